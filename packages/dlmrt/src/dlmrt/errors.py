"""Errors of dlmrt: each says what was given, what is allowed and how to put it right. All derive from OrlError."""

from orl_core.errors import OrlError


class DlmrtError(OrlError):
    """Base class of the engine's errors."""


class CheckpointError(DlmrtError):
    """A model folder is missing, incomplete, damaged or of a kind that the engine does not load."""


class ModelConfigError(CheckpointError):
    """A config.json or generation_config.json holds a value that the engine cannot honour."""


class QuantizationError(ModelConfigError):
    """A checkpoint is quantised in a way that the engine does not read, or cannot be quantised as asked."""


class TokenizerError(CheckpointError):
    """The model folder has no tokenizer, or its chat template cannot be rendered."""


class RequestError(DlmrtError, ValueError):
    """A request asks for something impossible; raised before any work is done."""


class NumericsError(DlmrtError):
    """The model produced NaN or infinite logits."""


class ComparisonError(DlmrtError):
    """A reference implementation cannot be run beside the engine, or gives other tokens."""

"""Errors of orl-train."""

from orl_core.errors import OrlError


class TrainError(OrlError):
    """Base class of the trainer's errors."""


class CheckpointError(TrainError):
    """A checkpoint is missing, damaged, of another shape, or cannot be written."""


class NonFiniteLossError(TrainError):
    """The loss is NaN or infinite; the last good checkpoint is kept."""

"""Errors of orl-eval: each says what was given, what is allowed and how to put it right."""

from orl_core.errors import OrlError


class EvalError(OrlError):
    """Base class of every error raised on purpose by orl-eval."""


class UnknownTaskError(EvalError, LookupError):
    """No task of this name."""


class SettingError(EvalError, ValueError):
    """A setting of the evaluation is outside its allowed range."""


class MissingExtraError(EvalError, ImportError):
    """An optional package that this choice needs is not installed."""


class ReportError(EvalError, OSError):
    """The report file cannot be written."""

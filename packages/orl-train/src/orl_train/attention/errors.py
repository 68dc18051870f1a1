"""Errors of the staircase attention."""

from orl_train.errors import TrainError


class AttentionBackendError(TrainError):
    """The chosen attention backend is unknown, not installed, or does not run on this device, dtype or shape."""

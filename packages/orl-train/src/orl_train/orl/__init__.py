"""On-policy residual learning: roll out, verify, replay, update, discard."""

from orl_train.orl.config import OrlConfig
from orl_train.orl.run import OrlRun

__all__ = ["OrlConfig", "OrlRun"]

"""The whole comparison: base, ORL, ablations and controls under one schedule, measured at many thresholds."""

from orl_train.reproduce.config import ReproduceConfig, load_study
from orl_train.reproduce.run import reproduce

__all__ = ["ReproduceConfig", "load_study", "reproduce"]

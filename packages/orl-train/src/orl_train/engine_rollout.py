"""Rollouts by dlmrt's engine on the training model's own weights: shared in memory, never saved or loaded."""

from typing import Any

from orl_core.errors import ConfigError
from orl_core.protocols import RolloutEngine
from orl_train.rollout import ReferenceRollout


def make_rollout(model: Any, stop_ids: frozenset[int], engine: str = "auto") -> RolloutEngine:
    """The rollout engine over `model`: "reference", "dlmrt", or "auto" (dlmrt where it is installed).

    The engine sees every in-place update of the model's weights. Raises ConfigError if dlmrt is asked for but missing.
    """
    if engine not in ("auto", "dlmrt", "reference"):
        raise ConfigError(f"rollout engine is {engine!r}; it must be 'auto', 'dlmrt' or 'reference'")
    if engine == "reference":
        return ReferenceRollout(model, stop_ids)
    try:
        from dlmrt.engine import Engine
    except ImportError as error:
        if engine == "dlmrt":
            raise ConfigError("dlmrt is not installed; install orl-train[engine], or use engine 'reference'") from error
        return ReferenceRollout(model, stop_ids)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    return Engine.from_state(config, model.state_dict(), generation={"eos_token_id": sorted(stop_ids)})

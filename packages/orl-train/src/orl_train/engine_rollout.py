"""Rollouts by dlmrt's engine on the training model's weights: shared in memory, or gathered anew if sharded."""

from typing import Any

from orl_core.capture import CaptureMode
from orl_core.errors import ConfigError
from orl_core.protocols import RolloutEngine
from orl_train.lora import has_lora
from orl_train.rollout import ReferenceRollout
from orl_train.sharding import is_sharded, whole_state


def make_rollout(
    model: Any, stop_ids: frozenset[int], engine: str = "auto", *, capture: CaptureMode = "async"
) -> RolloutEngine:
    """The rollout engine over `model`: "reference", "dlmrt", or "auto" (dlmrt where it is installed).

    capture: "async" copies captured states in a worker thread, "sync" between the steps.
    The engine sees every in-place update of the model's weights, except those of a sharded model or of LoRA, which
    `refresh_rollout` hands over. Raises ConfigError if dlmrt is asked for, or needed for a sharded model, but missing.
    """
    if engine not in ("auto", "dlmrt", "reference"):
        raise ConfigError(f"rollout engine is {engine!r}; it must be 'auto', 'dlmrt' or 'reference'")
    engine_class = None if engine == "reference" else _engine_class()
    if engine_class is None:
        if engine == "dlmrt":
            raise ConfigError("dlmrt is not installed; install orl-train[engine], or use engine 'reference'")
        if is_sharded(model):
            raise ConfigError("the built-in rollout does not run on a sharded model; install orl-train[engine]")
        return ReferenceRollout(model, stop_ids, capture=capture)
    config = model.config.to_dict() | {"architectures": [_architecture(model)]}
    rollout = engine_class.from_state(config, whole_state(model), generation={"eos_token_id": sorted(stop_ids)})
    rollout.capture_mode = capture
    return rollout


def refresh_rollout(rollout: RolloutEngine, model: Any) -> None:
    """Hands the present weights to a rollout that does not share them; every rank of a sharded model must call it."""
    if not isinstance(rollout, ReferenceRollout) and (is_sharded(model) or has_lora(model)):
        rollout.load_state(whole_state(model))  # pyright: ignore[reportAttributeAccessIssue] (dlmrt's engine)


def _engine_class() -> Any | None:
    try:
        from dlmrt.engine import Engine
    except ImportError:
        return None
    return Engine


def _architecture(model: Any) -> str:
    """The model's class as checkpoints name it; FSDP2 prefixes it."""
    return type(model).__name__.removeprefix("FSDP")

"""Checkpoints of a run whose model FSDP2 holds in shards.

accelerate's own take one optimizer a model, and this trainer has two. Everything is gathered, so that a run may
continue on another number of ranks; every function here must be called by all of them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from orl_train.lora import has_lora, load_trained_state, trained_state
from orl_train.saving import UPDATES, Checkpoints, newest_run, reading, write_run
from orl_train.sharding import load_whole_state, whole

_STATE = "optimizers.pt"


def save_sharded_run(
    accelerator: Accelerator,
    model: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    schedules: Sequence[Any],
    write_model: Callable[[Path], None],
    checkpoints: Checkpoints,
    step: int,
) -> None:
    """Writes the checkpoint after `step` updates and removes those that are not to be kept.

    write_model: writes the model in float32 to the folder it is given; called on the main process.
    """
    state = {
        "optimizers": [_gathered(optimizer.state_dict()) for optimizer in optimizers],
        "schedules": [schedule.state_dict() for schedule in schedules],
    }
    updates = {name: whole(tensor) for name, tensor in trained_state(model).items()} if has_lora(model) else None

    def write_state(target: Path) -> None:
        torch.save(state, target / _STATE)
        if updates is not None:
            save_file(updates, target / UPDATES)

    write_run(accelerator, write_state, write_model, checkpoints, step)


def resume_sharded_run(
    model: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    schedules: Sequence[Any],
    checkpoints: Checkpoints,
) -> int:
    """Loads the newest checkpoint and returns the updates it has seen; 0 if there is none.

    Raises ConfigError if it was made with other settings, CheckpointError if it is damaged.
    """
    found, step = newest_run(checkpoints)
    if found is None:
        return 0
    with reading(found):
        if has_lora(model):
            load_trained_state(model, load_file(found / "state" / UPDATES))
        else:
            files = sorted((found / "model").glob("*.safetensors"))
            load_whole_state(model, {name: tensor for file in files for name, tensor in load_file(file).items()})
        state = torch.load(found / "state" / _STATE, weights_only=True)
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(_distributed(saved, optimizer))
        for schedule, saved in zip(schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)
    return step


def _gathered(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with whole tensors."""
    moments = {
        number: {name: whole(value) if isinstance(value, Tensor) else value for name, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return {**state, "state": moments}


def _distributed(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The reverse of `_gathered`: tensors of a sharded parameter's shape are sharded as it is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def place(value: Any, like: Tensor) -> Any:
        if isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape:
            return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
        return value

    moments = {
        number: {name: place(value, parameters[number]) for name, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return {**state, "state": moments}

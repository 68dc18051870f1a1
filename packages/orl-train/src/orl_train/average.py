"""The average of models that were trained from one start: a model soup (Wortsman et al., 2022, arXiv 2203.05482).

Annealed descendants of one model lie in one basin, and their mean is often more accurate than each of them.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from orl_core.errors import ConfigError
from orl_train.checkpoint import write_folder
from orl_train.model_folder import model_folder

_WEIGHTS = "model.safetensors"


def average(sources: Sequence[str], out: Path) -> Path:
    """Writes to `out` the first model with the mean of all models' weights, and returns `out`.

    sources: at least two model folders, or `embedded:base` and the like, each with its weights in one file. The mean is
    taken in float32 and stored in the dtype of the first. All or nothing.
    Raises ConfigError for fewer than two, an existing `out`, or models whose tensors differ in name or shape.
    """
    if len(sources) < 2:
        raise ConfigError(f"an average needs at least two models, not {len(sources)}")
    if out.exists():
        raise ConfigError(f"{out} exists; choose another folder")
    folders = [model_folder(name) for name in sources]
    for folder in folders:
        if not (folder / _WEIGHTS).is_file():
            raise ConfigError(f"{folder} has no {_WEIGHTS}; models in several files are not averaged")
    states = [load_file(folder / _WEIGHTS) for folder in folders]
    shapes = [{name: tuple(tensor.shape) for name, tensor in state.items()} for state in states]
    for folder, shape in zip(folders, shapes, strict=True):
        if shape != shapes[0]:
            raise ConfigError(f"the tensors of {folder} differ from those of {folders[0]} in name or shape")
    mean = {
        name: torch.stack([state[name].float() for state in states]).mean(0).to(first.dtype)
        for name, first in states[0].items()
    }

    def write(folder: Path) -> None:
        for path in sorted(folders[0].iterdir()):
            if path.is_file() and path.name not in (_WEIGHTS, "README.md"):
                shutil.copyfile(path, folder / path.name)
        save_file(mean, folder / _WEIGHTS, metadata={"format": "pt"})

    write_folder(out, write)
    return out

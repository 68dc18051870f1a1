"""Strict loading of safetensors: names, shapes and sizes are checked against the headers before anything is read."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dlmrt.errors import CheckpointError
from dlmrt.models.base import ModelConfig

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER = 100_000_000
_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as a header describes it. nbytes: bytes in the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files: a single one, or those that the index lists. Raises CheckpointError."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{folder} lacks {_listed(missing)}, which {_INDEX} names; download them again")
        return [folder / name for name in names]
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{folder} holds weights only as {_listed(pickled)}, which is a pickle and may run code when loaded; "
            "convert it to safetensors (safetensors.torch.save_file)"
        )
    raise CheckpointError(f"{folder} has neither {_SINGLE} nor {_INDEX}; a checkpoint needs one of them")


def read_headers(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of a checkpoint, from the files' headers alone. Raises CheckpointError for a damaged file."""
    entries: dict[str, TensorEntry] = {}
    for file in weight_files(folder):
        entries |= _read_header(file)
    return entries


def _read_header(file: Path) -> dict[str, TensorEntry]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(_MAX_HEADER, size - 8):
                raise CheckpointError(
                    f"{file} is {size} bytes long, shorter than its header; it is truncated or no safetensors file"
                )
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries, end = {}, 0
        for name, raw in header.items():
            first, last = raw["data_offsets"]
            entries[name] = TensorEntry(file, tuple(raw["shape"]), raw["dtype"], last - first)
            end = max(end, last)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} has no valid safetensors header ({error!r}); it is damaged") from error
    if size != 8 + length + end:
        raise CheckpointError(
            f"{file} is {size} bytes long but its header describes {8 + length + end}; it is truncated or damaged, "
            "copy or download it again"
        )
    return entries


def check_tensors(config: ModelConfig, found: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raises CheckpointError that names missing, unexpected and mis-shaped tensors. found: name -> shape."""
    wanted = config.tensor_shapes()
    problems = []
    if missing := sorted(set(wanted) - set(found)):
        problems.append(f"missing: {_listed(missing)}")
    if unexpected := sorted(name for name in set(found) - set(wanted) if not config.ignores(name)):
        problems.append(f"unexpected: {_listed(unexpected)}")
    wrong = [
        f"{name} is {list(found[name])} and must be {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != shape
    ]
    if wrong:
        problems.append(f"wrong shape: {_listed(wrong)}")
    if problems:
        raise CheckpointError(f"the tensors of {source} do not fit its config.json; {'; '.join(problems)}")


def load_tensors(folder: Path, config: ModelConfig, device: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The checkpoint's tensors, memory-mapped; converted to `dtype`, or as they are stored if it is None.

    Raises CheckpointError before any tensor is read if one is missing, unexpected, mis-shaped or not a float.
    """
    from safetensors import SafetensorError, safe_open

    entries = read_headers(folder)
    check_tensors(config, {name: entry.shape for name, entry in entries.items()}, str(folder))
    wanted = [name for name in config.tensor_shapes() if name in entries]
    if other := sorted({entries[name].dtype for name in wanted} - _FLOATS):
        raise CheckpointError(f"{folder} holds tensors of type {_listed(other)}; the engine reads {sorted(_FLOATS)}")
    tensors: dict[str, Tensor] = {}
    for file in sorted({entries[name].file for name in wanted}):
        try:
            with safe_open(file, framework="pt", device=device) as opened:
                for name in (name for name in wanted if entries[name].file == file):
                    tensor = opened.get_tensor(name)
                    tensors[name] = tensor if dtype is None else tensor.to(dtype)
        except SafetensorError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    return tensors


def _listed(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more

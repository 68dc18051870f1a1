"""Strict loading of safetensors: names, shapes and sizes are checked against the headers before anything is read."""

import json
import struct
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlmrt.checkpoint.layout import Layout, Piece, Wanted, layout
from dlmrt.checkpoint.quantization import Quantization
from dlmrt.errors import CheckpointError
from dlmrt.models.base import ModelConfig
from orl_core.nvfp4 import from_checkpoint

_SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER = 100_000_000
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as a header describes it. nbytes: bytes in the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files: a single one, or those that the index lists. Raises CheckpointError."""
    single, index = folder / _SINGLE, folder / INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{folder} lacks {_listed(missing)}, which {INDEX} names; download them again")
        return [folder / name for name in names]
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{folder} holds weights only as {_listed(pickled)}, which is a pickle and may run code when loaded; "
            "convert it to safetensors (safetensors.torch.save_file)"
        )
    raise CheckpointError(f"{folder} has neither {_SINGLE} nor {INDEX}; a checkpoint needs one of them")


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
    wanted = {name: Wanted((shape,), ()) for name, shape in config.tensor_shapes().items()}
    _refuse(_misfits(wanted, found, config.ignores), source)


def check_files(plan: Layout, entries: Mapping[str, TensorEntry], source: str) -> None:
    """The same for the files of a checkpoint, quantised or not, whose headers tell the dtypes as well."""
    wanted = plan.files()
    problems = _misfits(wanted, {name: entry.shape for name, entry in entries.items()}, plan.ignores)
    wrong = [
        f"{name} is {entries[name].dtype} and must be {' or '.join(tensor.dtypes)}"
        for name, tensor in wanted.items()
        if name in entries and entries[name].dtype not in tensor.dtypes
    ]
    if wrong:
        problems.append(f"wrong type: {_listed(wrong)}")
    quantization = plan.quantization
    excluded = [piece.name for piece in plan.quantised() if quantization and not quantization.covers(piece.name)]
    if excluded:
        problems.append(f"quantised although the settings exclude it: {_listed(excluded)}")
    _refuse(problems, source)


def _misfits(
    wanted: Mapping[str, Wanted], found: Mapping[str, tuple[int, ...]], ignores: Callable[[str], bool]
) -> list[str]:
    problems = []
    if missing := sorted(set(wanted) - set(found)):
        problems.append(f"missing: {_listed(missing)}")
    if unexpected := sorted(name for name in set(found) - set(wanted) if not ignores(name)):
        problems.append(f"unexpected: {_listed(unexpected)}")
    wrong = [
        f"{name} is {list(found[name])} and must be {' or '.join(str(list(shape)) for shape in tensor.shapes)}"
        for name, tensor in wanted.items()
        if name in found and tuple(found[name]) not in tensor.shapes
    ]
    if wrong:
        problems.append(f"wrong shape: {_listed(wrong)}")
    return problems


def _refuse(problems: list[str], source: str) -> None:
    if problems:
        raise CheckpointError(f"the tensors of {source} do not fit its config.json; {'; '.join(problems)}")


def main_dtype(plan: Layout, entries: Mapping[str, TensorEntry]) -> torch.dtype:
    """The dtype that most bytes of the model's unquantised tensors are stored in; into it NVFP4 is expanded."""
    sizes: dict[str, int] = {}
    for parts in plan.pieces.values():
        for entry in (entries[piece.name] for piece in parts if not piece.nvfp4):
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
    return _DTYPES[max(sizes, key=lambda dtype: sizes[dtype])]


def load_tensors(
    folder: Path,
    config: ModelConfig,
    device: str,
    dtype: torch.dtype | None,
    quantization: Quantization | None = None,
) -> dict[str, Tensor]:
    """The checkpoint's tensors, memory-mapped; converted to `dtype`, or as they are stored if it is None.

    NVFP4 is expanded one matrix at a time: to `dtype`, or to that of the unquantised tensors. Raises CheckpointError
    before any tensor is read if one is missing, unexpected, mis-shaped or of a wrong type.
    """
    entries = read_headers(folder)
    plan = layout(config, entries, quantization)
    check_files(plan, entries, str(folder))
    expanded = dtype or main_dtype(plan, entries)
    with TensorFiles(entries, device) as files:
        return {name: _assemble(files, plan, name, dtype, expanded) for name in files.by_file(plan)}


class TensorFiles:
    """The open files of a checkpoint; a tensor is read when it is asked for."""

    def __init__(self, entries: Mapping[str, TensorEntry], device: str = "cpu") -> None:
        self.entries, self.device = entries, device
        self._opened: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Tensor:
        """Raises CheckpointError if the file cannot be read."""
        from safetensors import SafetensorError, safe_open

        file = self.entries[name].file
        try:
            if file not in self._opened:
                self._opened[file] = self._stack.enter_context(safe_open(file, framework="pt", device=self.device))
            return self._opened[file].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    def by_file(self, plan: Layout) -> list[str]:
        """The model's tensors in the order of the files that their first parts lie in."""
        first = {name: next(plan.stored(parts[0]))[0] for name, parts in plan.pieces.items()}
        return sorted(first, key=lambda name: self.entries[first[name]].file)

    def piece(self, plan: Layout, piece: Piece, expanded: torch.dtype) -> Tensor:
        """A stored matrix: as it is, or expanded from NVFP4."""
        if not piece.nvfp4:
            return self[piece.name]
        tensors = {name: self[name] for name, _ in plan.stored(piece)}
        return from_checkpoint(piece.name, tensors, columns=piece.shape[1]).dequantize(expanded)


def _assemble(files: TensorFiles, plan: Layout, name: str, dtype: torch.dtype | None, expanded: torch.dtype) -> Tensor:
    parts = plan.pieces[name]
    if parts[0].expert is None:
        tensor = files.piece(plan, parts[0], expanded)
        return tensor if dtype is None else tensor.to(dtype)
    stacked = torch.empty(plan.config.tensor_shapes()[name], dtype=expanded, device=files.device)
    for part in parts:
        stacked[part.expert, part.row : part.row + part.shape[0]] = files.piece(plan, part, expanded)
    return stacked


def _listed(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more

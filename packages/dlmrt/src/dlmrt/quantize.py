"""Writing an NVFP4 checkpoint from an unquantised one, matrix by matrix.

The attention, MLP and expert projections of every layer are quantised; embeddings, LM head, norms, routers, residual
adapter and self-conditioning stay as they are. Matrices that engines multiply as one (q, k and v; gate and up) share
their global scale, because the joint matrix has one. Only weights are quantised: no activation scale is calibrated.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import prod, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlmrt import __version__
from dlmrt.checkpoint.folder import read_folder, read_json
from dlmrt.checkpoint.hub import resolve
from dlmrt.checkpoint.layout import Layout, Piece, layout
from dlmrt.checkpoint.quantization import MODELOPT_FILE, Quantization, settings_json
from dlmrt.checkpoint.weights import INDEX, TensorEntry, TensorFiles, check_files, read_headers
from dlmrt.checkpoint.writer import TensorWriter, new_folder
from dlmrt.errors import QuantizationError
from orl_core.errors import OrlError
from orl_core.nvfp4 import GROUP, TENSOR_NAMES, Dialect, quantize

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_JOINT = re.compile(r"\.(?:([qkv])|gate|up)_proj$")
_COPIED = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "LICENSE*", "NOTICE*")
_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight")
_ITEMSIZE = {"U8": 1, "F8_E4M3": 1, "F32": 4}


@dataclass(slots=True)
class LayerReport:
    """relative_error: |W - Q| / |W| in the Frobenius norm over all matrices of the layer; worst: the matrix where it is
    largest."""

    layer: int
    matrices: int = 0
    parameters: int = 0
    relative_error: float = 0.0
    worst: str = ""
    worst_error: float = 0.0
    _squares: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, name: str, weight: Tensor, quantised: Tensor) -> None:
        error, norm = ((x.double() ** 2).sum().item() for x in (weight.float() - quantised, weight))
        self._squares = [self._squares[0] + error, self._squares[1] + norm]
        self.matrices, self.parameters = self.matrices + 1, self.parameters + weight.numel()
        self.relative_error = _relative(*self._squares)
        if not self.worst or _relative(error, norm) > self.worst_error:
            self.worst, self.worst_error = name, _relative(error, norm)

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if not key.startswith("_")}


def _relative(error: float, norm: float) -> float:
    return sqrt(error / norm) if norm else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationReport:
    """bytes_before, bytes_after: of all tensors in the files."""

    source: str
    target: str
    dialect: Dialect
    bytes_before: int
    bytes_after: int
    layers: tuple[LayerReport, ...]

    def to_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("source", "target", "dialect", "bytes_before", "bytes_after")}
        return own | {"layers": [layer.to_dict() for layer in self.layers]}


def quantize_folder(
    source: str | Path,
    target: str | Path,
    dialect: Dialect = "compressed-tensors",
    *,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> QuantizationReport:
    """Writes the NVFP4 checkpoint `target` from the folder, hub id or embedded model `source`. All or nothing.

    The files are those of the source, each written tensor by tensor. dialect: "compressed-tensors" or "modelopt".
    progress: called with the tensors written and their total. Raises CheckpointError, and QuantizationError (one of
    them) if the source is quantised already or holds a matrix that the dialect cannot represent.
    """
    if dialect not in TENSOR_NAMES:
        raise QuantizationError(f"dialect is {dialect!r}; it must be one of {sorted(TENSOR_NAMES)}")
    folder, target = resolve(source, revision), Path(target).expanduser()
    settings, entries = read_folder(folder), read_headers(folder)
    if settings.quantization is not None:
        raise QuantizationError(f"{source} is quantised already, in NVFP4 of {settings.quantization.dialect}")
    check_files(layout(settings.config, entries, None), entries, str(folder))
    plan = layout(settings.config, (), Quantization(dialect))
    quantised = {name: parts for name, parts in plan.pieces.items() if parts[0].nvfp4}
    _check_columns(quantised, dialect)
    files = _planned_files(plan, quantised, entries)
    layers: dict[int, LayerReport] = {}
    with new_folder(target) as new, TensorFiles(entries) as opened:
        maxima = _JointMaxima(quantised, opened)
        for done, (name, writer) in enumerate(_writers(new, files, entries), 1):
            tensor = opened[name]
            for piece in quantised.get(name, ()):
                report = layers.setdefault(_layer(name), LayerReport(_layer(name)))
                for stored, part in _quantise(piece, _matrix(tensor, piece), maxima, dialect, report).items():
                    writer.write(stored, part)
            if name not in quantised:
                writer.write(name, tensor)
            if progress is not None:
                progress(done, len(entries))
        _write_settings(new, folder, files, {piece.name for piece in plan.quantised()}, dialect)
    return QuantizationReport(
        source=str(source),
        target=str(target),
        dialect=dialect,
        bytes_before=sum(entry.nbytes for entry in entries.values()),
        bytes_after=sum(entry.nbytes for file in files.values() for entry in file.values()),
        layers=tuple(layers[index] for index in sorted(layers)),
    )


def _layer(name: str) -> int:
    found = _LAYER.search(name)
    assert found is not None  # a projection is one of a layer
    return int(found[1])


def _check_columns(quantised: Mapping[str, tuple[Piece, ...]], dialect: Dialect) -> None:
    for piece in (piece for parts in quantised.values() for piece in parts):
        if dialect == "compressed-tensors" and piece.shape[1] % GROUP:
            raise QuantizationError(
                f"{piece.name} has {piece.shape[1]} columns; compressed-tensors needs a multiple of {GROUP}, "
                "use the modelopt dialect, which pads"
            )


def _planned_files(
    plan: Layout, quantised: Mapping[str, tuple[Piece, ...]], entries: Mapping[str, TensorEntry]
) -> dict[Path, dict[str, TensorEntry]]:
    """What each of the source's files becomes."""
    files: dict[Path, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        file = files.setdefault(entry.file, {})
        if name not in quantised:
            file[name] = entry
        for stored, wanted in (item for piece in quantised.get(name, ()) for item in plan.stored(piece)):
            shape, dtype = wanted.shapes[0], wanted.dtypes[0]
            file[stored] = TensorEntry(entry.file, shape, dtype, prod(shape) * _ITEMSIZE[dtype])
    return files


def _writers(
    new: Path, files: Mapping[Path, Mapping[str, TensorEntry]], entries: Mapping[str, TensorEntry]
) -> Iterator[tuple[str, TensorWriter]]:
    """Every tensor of the source, with the writer of the file that it goes to."""
    for path, planned in files.items():
        with TensorWriter(new / path.name, planned) as writer:
            for name in (name for name, entry in entries.items() if entry.file == path):
                yield name, writer


class _JointMaxima:
    """The largest magnitude over matrices that share a global scale; None for a matrix that shares it with no other."""

    def __init__(self, quantised: Mapping[str, tuple[Piece, ...]], opened: TensorFiles) -> None:
        self._opened, self._known = opened, {}
        self._members: dict[str, list[tuple[str, Piece]]] = {}
        for name, piece in ((name, piece) for name, parts in quantised.items() for piece in parts):
            self._members.setdefault(_joint(piece.name), []).append((name, piece))

    def of(self, piece: Piece) -> Tensor | None:
        key = _joint(piece.name)
        if len(self._members[key]) == 1:
            return None
        if key not in self._known:
            maxima = [_matrix(self._opened[name], part).abs().max().float() for name, part in self._members[key]]
            self._known[key] = torch.stack(maxima).max()
        return self._known[key]


def _joint(module: str) -> str:
    """The name of the matrix that `module` is a part of where q, k and v, or gate and up, are multiplied as one."""
    return _JOINT.sub(lambda match: ".qkv_proj" if match[1] else ".gate_up_proj", module)


def _matrix(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor if piece.expert is None else tensor[piece.expert].narrow(0, piece.row, piece.shape[0])


def _quantise(
    piece: Piece, matrix: Tensor, maxima: _JointMaxima, dialect: Dialect, report: LayerReport
) -> dict[str, Tensor]:
    """The stored tensors of one matrix; its error goes to the report of its layer."""
    try:
        quantised = quantize(matrix, dialect, amax=maxima.of(piece))
    except OrlError as error:
        raise QuantizationError(f"{piece.name} cannot be quantised: {error}") from error
    report.add(piece.name, matrix, quantised.dequantize())
    return quantised.to_checkpoint(piece.name)


def _write_settings(
    new: Path,
    folder: Path,
    files: Mapping[Path, Mapping[str, TensorEntry]],
    modules: set[str],
    dialect: Dialect,
) -> None:
    """All files but the weights: the index and config.json of the result, the others as they are.

    modules: those that are quantised.
    """
    for path in sorted({path for pattern in _COPIED for path in folder.glob(pattern)}):
        shutil.copyfile(path, new / path.name)
    stored = {name: entry for file in files.values() for name, entry in file.items()}
    if (folder / INDEX).is_file():
        size = sum(entry.nbytes for entry in stored.values())
        weight_map = {name: entry.file.name for name, entry in sorted(stored.items())}
        _write_json(new / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    linear = {name.removesuffix(".weight") for name, entry in stored.items() if _may_be_linear(name, entry)}
    ignore = sorted({"lm_head"} | linear - modules)
    settings, own = settings_json(dialect, ignore, {"name": "dlmrt", "version": __version__})
    _write_json(new / "config.json", read_json(folder / "config.json") | {"quantization_config": settings})
    if own is not None:
        _write_json(new / MODELOPT_FILE, own)


def _may_be_linear(name: str, entry: TensorEntry) -> bool:
    return len(entry.shape) == 2 and name.endswith(".weight") and not name.endswith(_EMBEDDINGS)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

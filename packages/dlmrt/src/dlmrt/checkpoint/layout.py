"""In which stored matrices each of a model's tensors lies: one by one, or packed in NVFP4.

A quantised checkpoint keeps linear modules; experts that the model holds in one tensor are stored one by one then, as
`experts.{i}.{gate,up,down}_proj`. Shape legend: E experts, N rows, K columns, m width of an expert.
"""

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass

from dlmrt.checkpoint.footprint import is_projection
from dlmrt.checkpoint.quantization import Quantization
from dlmrt.models.base import ModelConfig
from orl_core.nvfp4 import GROUP, TENSOR_NAMES, Dialect

_STACKED = re.compile(r"(.*\.experts\.)(gate_up|down)_proj")
# Shapes of a global scale: the dialect's own first.
_NUMBER: dict[Dialect, tuple[tuple[int, ...], ...]] = {"compressed-tensors": ((1,), ()), "modelopt": ((), (1,))}
# Scales of the KV cache, which the engine keeps in its own dtype.
_CACHE_SCALE = re.compile(r"\.[kv]_scale$")
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Piece:
    """One stored matrix and its place in the model's tensor.

    name    of the tensor, or without ".weight" of the module where it is in NVFP4
    shape   of the matrix, unpacked
    expert  index into the model's tensor [E, ...], None if the piece is the whole tensor
    row     first row there
    """

    name: str
    shape: tuple[int, ...]
    nvfp4: bool
    expert: int | None = None
    row: int = 0

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that the files must hold, of one of these shapes and dtypes (by safetensors' names)."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """pieces: of each tensor of the model that is stored, or ought to be."""

    config: ModelConfig
    quantization: Quantization | None
    pieces: dict[str, tuple[Piece, ...]]

    def files(self) -> dict[str, Wanted]:
        """Every tensor that the files must hold."""
        return {
            name: wanted for parts in self.pieces.values() for piece in parts for name, wanted in self.stored(piece)
        }

    def stored(self, piece: Piece) -> Iterator[tuple[str, Wanted]]:
        """The tensors of one piece; the scale of its input, which is optional and not used, is not among them."""
        if not piece.nvfp4:
            yield piece.name, Wanted((piece.shape,), FLOATS)
            return
        assert self.quantization is not None
        rows, columns = piece.shape
        packed, scale, number, _ = TENSOR_NAMES[self.quantization.dialect]
        if self.quantization.dialect == "modelopt":
            columns += -columns % GROUP
        yield f"{piece.name}.{packed}", Wanted(((rows, columns // 2),), ("U8",))
        yield f"{piece.name}.{scale}", Wanted(((rows, columns // GROUP),), ("F8_E4M3",))
        yield f"{piece.name}.{number}", Wanted(_NUMBER[self.quantization.dialect], ("F32",))

    def quantised(self) -> list[Piece]:
        return [piece for parts in self.pieces.values() for piece in parts if piece.nvfp4]

    def ignores(self, name: str) -> bool:
        """Whether the files may hold a tensor that nothing reads."""
        if self.config.ignores(name):
            return True
        if self.quantization is None:
            return False
        input_scale = TENSOR_NAMES[self.quantization.dialect][3]
        return name.endswith(f".{input_scale}") or _CACHE_SCALE.search(name) is not None


def layout(config: ModelConfig, found: Container[str], quantization: Quantization | None) -> Layout:
    """found: names that the files hold.

    A projection is in NVFP4 if the settings say so, and any other matrix (an LM head, a self-conditioning MLP) if it is
    stored so: which of those are linear modules of the model that was quantised, the settings do not tell.
    """
    pieces = {}
    for name, shape in config.tensor_shapes().items():
        stacked = _STACKED.fullmatch(name) if quantization is not None and name not in found else None
        parts = _experts(stacked, shape) if stacked else [Piece(name, shape, False)]
        pieces[name] = tuple(_resolved(piece, found, quantization) for piece in parts)
    return Layout(config, quantization, pieces)


def _experts(stacked: re.Match[str], shape: tuple[int, ...]) -> list[Piece]:
    """The modules of experts [E, 2m, K] (gate over up) or [E, N, m]."""
    experts, rows, columns = shape
    names = ("gate", "up") if stacked[2] == "gate_up" else ("down",)
    part = rows // len(names)
    return [
        Piece(f"{stacked[1]}{expert}.{name}_proj.weight", (part, columns), False, expert, index * part)
        for expert in range(experts)
        for index, name in enumerate(names)
    ]


def _resolved(piece: Piece, found: Container[str], quantization: Quantization | None) -> Piece:
    if quantization is None or len(piece.shape) != 2 or not piece.name.endswith(".weight"):
        return piece
    packed = (
        f"{piece.module}.{'weight_packed' if quantization.dialect == 'compressed-tensors' else 'weight_scale'}" in found
    )
    if packed or (is_projection(piece.name) and quantization.covers(piece.module)):
        return Piece(piece.module, piece.shape, True, piece.expert, piece.row)
    return piece

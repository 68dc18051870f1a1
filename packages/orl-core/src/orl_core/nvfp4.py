"""NVFP4 weights: 4-bit e2m1 codes, one float8 e4m3 scale per 16 columns, one float32 scale per matrix.

Two checkpoint dialects describe the same numbers, with scales that are rounded differently:

compressed-tensors (`nvfp4-pack-quantized`): g = 2688 / amax, s = e4m3(amax_block / 6 * g), value = code * (s / g)
ModelOpt (`NVFP4`):                          g = amax / 2688, s = e4m3(amax_block / (6 g)), value = code * (s * g)

2688 = 448 * 6 is the product of the largest e4m3 and e2m1 values. Both pack the even column into the low nibble.
Shape legend: N rows (outputs), K columns (inputs), padded by ModelOpt to a multiple of 16.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from orl_core.errors import ConfigError, DataError, ShapeError

Dialect = Literal["compressed-tensors", "modelopt"]

GROUP = 16
_CODE_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MAX, _E4M3_MAX = 6.0, 448.0
# Each dialect's tensor names: packed codes, block scales, global scale, activation scale.
TENSOR_NAMES = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
}


def encode_e2m1(x: Tensor) -> Tensor:
    """e2m1 codes of `x`, uint8 of its shape: bit 3 is the sign, 0..7 stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6.

    Rounds to nearest, ties to the even code; |x| > 6 gives 6. A negative number that rounds to zero keeps its sign
    (code 8), -0.0 does not (code 0).
    """
    magnitude, code = x.abs(), torch.zeros_like(x, dtype=torch.uint8)
    for even_below in (0.25, 1.25, 2.5, 5.0):
        code += magnitude > even_below
    for even_above in (0.75, 1.75, 3.5):
        code += magnitude >= even_above
    return code + (x < 0).to(torch.uint8) * 8


def decode_e2m1(code: Tensor) -> Tensor:
    """float32 values of e2m1 codes (uint8, 0..15); code 8 is -0.0."""
    values = torch.tensor(_CODE_VALUES + tuple(-v for v in _CODE_VALUES), device=code.device)
    return values[code.int()]


def pack(code_NK: Tensor) -> Tensor:
    """Two codes a byte, uint8 [N, K/2]: the even column in the low nibble."""
    return code_NK[..., 0::2] | (code_NK[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Inverse of `pack`: uint8 [N, K/2] -> uint8 codes [N, K]."""
    return torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2)


@dataclass(frozen=True, slots=True)
class Nvfp4Tensor:
    """A quantised matrix.

    packed       uint8 [N, K/2]
    block_scale  float8_e4m3fn [N, K/16], row-major
    global_scale float32 []  in the dialect's own sense: a divisor for compressed-tensors, a factor for ModelOpt
    dialect      whose rounding and names these are
    columns      columns of the original matrix; less than K where ModelOpt padded
    input_scale  float32 [] or None: the calibrated scale of the layer's input, again in the dialect's own sense
    """

    packed: Tensor
    block_scale: Tensor
    global_scale: Tensor
    dialect: Dialect
    columns: int
    input_scale: Tensor | None = None

    def value_scale(self) -> Tensor:
        """What a block's e2m1 values are multiplied by, float32 [N, K/16]."""
        return _value_scale(self.block_scale, self.global_scale, self.dialect)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix [N, columns]; products are formed in float32 and rounded to `dtype` once."""
        value = decode_e2m1(unpack(self.packed)).unflatten(-1, (-1, GROUP)) * self.value_scale()[..., None]
        return value.flatten(-2)[:, : self.columns].to(dtype)

    def to_checkpoint(self, name: str) -> dict[str, Tensor]:
        """The tensors that a checkpoint of the dialect holds for the module `name`."""
        shape = (1,) if self.dialect == "compressed-tensors" else ()
        stored = [self.packed, self.block_scale, self.global_scale.reshape(shape)]
        if self.input_scale is not None:
            stored.append(self.input_scale.reshape(shape))
        return {f"{name}.{part}": tensor for part, tensor in zip(TENSOR_NAMES[self.dialect], stored, strict=False)}


def quantize(weight_NK: Tensor, dialect: Dialect, *, amax: Tensor | None = None) -> Nvfp4Tensor:
    """Quantises a matrix bit for bit as the dialect's own library does.

    weight_NK: float32, bfloat16 or float16 [N, K]. compressed-tensors needs K to be a multiple of 16; ModelOpt pads.
    amax: [] in the dtype of `weight_NK`: the largest magnitude over all matrices that share one global scale, such as
    q, k and v of one layer; by default that of `weight_NK`.
    A matrix whose magnitudes are all zero or subnormal gets the global scale 1.
    Raises ShapeError for another rank, dtype or number of columns, DataError for infinite or NaN weights.
    """
    if dialect not in TENSOR_NAMES:
        raise ConfigError(f"dialect is {dialect!r}; it must be one of {sorted(TENSOR_NAMES)}")
    if weight_NK.dim() != 2 or weight_NK.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ShapeError(
            f"the weight is {weight_NK.dtype} {list(weight_NK.shape)}; it must be float32, bfloat16 or float16 [N, K]"
        )
    if weight_NK.numel() == 0:
        raise ShapeError(f"the weight is empty, {list(weight_NK.shape)}; it must have at least one row and one column")
    if not torch.isfinite(weight_NK).all():
        raise DataError("the weight holds infinite or NaN values, which NVFP4 cannot represent; repair the checkpoint")
    columns = weight_NK.shape[1]
    if dialect == "modelopt":
        weight_NK = torch.nn.functional.pad(weight_NK.float(), (0, -columns % GROUP))
    elif columns % GROUP:
        raise ShapeError(
            f"the weight has {columns} columns; compressed-tensors needs a multiple of {GROUP}: "
            "pad the matrix or use the modelopt dialect"
        )
    grouped = weight_NK.unflatten(-1, (-1, GROUP))
    block_amax = grouped.abs().amax(-1)
    amax = block_amax.amax() if amax is None else amax.to(block_amax.dtype)
    if dialect == "compressed-tensors":
        block_scale, global_scale = _compressed_tensors_scales(block_amax, amax)
    else:
        block_scale, global_scale = _modelopt_scales(block_amax, amax)
    scale = _value_scale(block_scale, global_scale, dialect)
    code_NK = encode_e2m1(grouped.float() / scale[..., None]).flatten(-2)
    return Nvfp4Tensor(pack(code_NK), block_scale, global_scale, dialect, columns)


def _value_scale(block_scale: Tensor, global_scale: Tensor, dialect: Dialect) -> Tensor:
    scale = block_scale.float()
    return scale / global_scale if dialect == "compressed-tensors" else scale * global_scale


def _compressed_tensors_scales(block_amax: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """The quotients are rounded to the weight's dtype first; a scale that comes out as 0 is stored as 0.125."""
    global_scale = _E4M3_MAX * _E2M1_MAX / amax.clamp(min=torch.finfo(amax.dtype).tiny)
    global_scale = torch.nan_to_num(global_scale, nan=1.0, posinf=1.0).float()
    scale = (global_scale * (block_amax / _E2M1_MAX).float()).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
    return torch.where(scale.float() == 0, 0.125, scale.float()).to(torch.float8_e4m3fn), global_scale


def _modelopt_scales(block_amax: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """All in float32; the scale of an all-zero block is stored as 1, others are at least 2^-9."""
    global_scale = amax / (_E4M3_MAX * _E2M1_MAX)
    # ModelOpt itself divides by zero here; 1 is what compressed-tensors uses.
    global_scale = torch.where(global_scale < torch.finfo(torch.float32).tiny, 1.0, global_scale)
    scale = block_amax / (_E2M1_MAX * global_scale)
    scale = torch.where(scale == 0, 1.0, scale).clamp(2.0**-9, _E4M3_MAX)
    return scale.to(torch.float8_e4m3fn), global_scale


def from_checkpoint(name: str, tensors: Mapping[str, Tensor], *, columns: int | None = None) -> Nvfp4Tensor:
    """The quantised matrix of module `name` from a checkpoint of either dialect.

    columns: columns of the original matrix, where ModelOpt may have padded it; by default all that are stored.
    Raises DataError where tensors are missing, ShapeError where shapes or dtypes do not fit together.
    """
    dialect: Dialect = "compressed-tensors" if f"{name}.weight_packed" in tensors else "modelopt"
    names = [f"{name}.{part}" for part in TENSOR_NAMES[dialect]]
    if missing := [n for n in names[:3] if n not in tensors]:
        raise DataError(
            f"{', '.join(missing)} not found; an NVFP4 module holds "
            + " or ".join(", ".join(parts[:3]) for parts in TENSOR_NAMES.values())
        )
    packed, block_scale, global_scale = (tensors[n] for n in names[:3])
    if packed.dim() != 2 or packed.dtype != torch.uint8 or packed.shape[1] % (GROUP // 2):
        raise ShapeError(f"{names[0]} is {packed.dtype} {list(packed.shape)}; it must be uint8 [N, multiple of 8]")
    rows, stored = packed.shape[0], 2 * packed.shape[1]
    if block_scale.dtype != torch.float8_e4m3fn or block_scale.shape != (rows, stored // GROUP):
        raise ShapeError(
            f"{names[1]} is {block_scale.dtype} {list(block_scale.shape)}; "
            f"it must be float8_e4m3fn {[rows, stored // GROUP]}"
        )
    scales = {n: tensors[n] for n in names[2:] if n in tensors}
    for n, scale in scales.items():
        if scale.dtype != torch.float32 or scale.numel() != 1:
            raise ShapeError(f"{n} is {scale.dtype} {list(scale.shape)}; it must be one float32 number")
    columns = stored if columns is None else columns
    if not stored - GROUP < columns <= stored:
        raise ShapeError(f"columns is {columns}; {names[0]} stores {stored}, of which at most {GROUP - 1} are padding")
    input_scale = scales[names[3]].reshape(()) if names[3] in scales else None
    return Nvfp4Tensor(packed, block_scale, global_scale.reshape(()), dialect, columns, input_scale)

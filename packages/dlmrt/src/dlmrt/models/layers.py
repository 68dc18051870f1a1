"""Building blocks that the model families share.

Shape legend: B rows, T tokens, S cache positions, H heads, D head width, d model width.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from dlmrt.cache import Span
from orl_core.residual import ResidualAdapter


class StackedLinear:
    """Several bias-free projections of one input. Fused, their weights are one matrix and one product."""

    __slots__ = ("sizes", "weights")

    def __init__(self, weights: Sequence[Tensor], *, fuse: bool) -> None:
        self.sizes = [w.shape[0] for w in weights]
        self.weights = [torch.cat(list(weights))] if fuse else list(weights)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if len(self.weights) == 1:
            return F.linear(x, self.weights[0]).split(self.sizes, -1)
        return [F.linear(x, w) for w in self.weights]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


Activation = Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh approximation, as in Gemma."""
    return F.gelu(x, approximate="tanh")


class GatedMlp:
    """down(act(gate(x)) * up(x)) over the tensors `{prefix}{gate,up,down}_proj.weight`."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str, *, fuse: bool, act: Activation = F.silu) -> None:
        self.gate_up = StackedLinear([tensors[f"{prefix}{n}_proj.weight"] for n in ("gate", "up")], fuse=fuse)
        self.down, self.act = tensors[f"{prefix}down_proj.weight"], act

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        return F.linear(self.act(gate) * up, self.down)


def gated_mlp_shapes(prefix: str, d: int, m: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a `GatedMlp` of width d and inner width m."""
    shapes = {"gate_proj.weight": (m, d), "up_proj.weight": (m, d), "down_proj.weight": (d, m)}
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def residual_adapter(tensors: Mapping[str, Tensor], eps: float) -> ResidualAdapter | None:
    """orl-core's adapter over the tensors named `residual_adapter.*`, without copying them; None if there are none."""
    prefix = "residual_adapter."
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if not own:
        return None
    rows, width = own["gate_proj.weight"].shape
    with torch.device("meta"):
        adapter = ResidualAdapter(width, rows, eps)
    adapter.load_state_dict(own, assign=True)
    return adapter.requires_grad_(False)


def residual_adapter_shapes(width: int, rows: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the adapter's tensors; none for a model without adapter (rows = 0)."""
    if not rows:
        return {}
    shapes = {"norm.weight": (width,), "gate_proj.weight": (rows, width), "up_proj.weight": (rows, width)}
    shapes |= {"down_proj.weight": (width, rows), "alpha": ()}
    return {f"residual_adapter.{name}": shape for name, shape in shapes.items()}


class RotaryTable:
    """cos and sin of the angles position * inv_freq, tabulated in float32 up to the longest span seen so far.

    inv_freq: float32 [R / 2], where R <= D is the number of leading dimensions of a head that are rotated.
    """

    def __init__(self, inv_freq: Tensor, dtype: torch.dtype) -> None:
        self.inv_freq, self.dtype = inv_freq, dtype
        self._extend(0)

    @classmethod
    def default(cls, theta: float, rotated: int, dtype: torch.dtype, device: torch.device) -> "RotaryTable":
        """inv_freq_i = theta^(-2i / rotated)."""
        exponent = torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / rotated
        return cls(1.0 / theta**exponent, dtype)

    def _extend(self, length: int) -> None:
        angle = torch.arange(length, device=self.inv_freq.device).float()[:, None] * self.inv_freq
        sin = angle.sin()
        self.cos = torch.cat([angle.cos()] * 2, -1).to(self.dtype)
        self.signed_sin = torch.cat([-sin, sin], -1).to(self.dtype)

    def at(self, span: Span) -> tuple[Tensor, Tensor]:
        """(cos, signed sin) of the span's tokens, [B or 1, T, 1, R] each."""
        if span.keys > self.cos.shape[0]:
            self._extend(1 << (span.keys - 1).bit_length())
        start = span.common_start
        if start is not None:
            cos, sin = self.cos[start : span.keys], self.signed_sin[start : span.keys]
            return cos[None, :, None], sin[None, :, None]
        return self.cos[span.positions][:, :, None], self.signed_sin[span.positions][:, :, None]


def rotate(x_BTHR: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split convention: x cos + rotate_half(x) sin.

    rotate_half(x) is x rolled by half its width with the first half negated; the sign is in `signed_sin`.
    """
    return torch.addcmul(x_BTHR * cos, x_BTHR.roll(x_BTHR.shape[-1] // 2, -1), signed_sin)


def attend(
    q_BTHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, span: Span, *, scale: float, window: int | None = None
) -> Tensor:
    """Grouped-query attention of the span's tokens over the cache views that `KVCache.write` returned.

    window: width of a sliding-attention layer, None for full attention. Returns [B, T, H * D].
    """
    mask = span.mask(window)
    out_BHTD = F.scaled_dot_product_attention(
        q_BTHD.transpose(1, 2),
        k_BSHD.transpose(1, 2),
        v_BSHD.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None and span.causal and span.length > 1,
        scale=scale,
        enable_gqa=q_BTHD.shape[2] != k_BSHD.shape[2],
    )
    return out_BHTD.transpose(1, 2).flatten(2)

"""Launches the Triton kernels of staircase attention: plan, checks, autograd.

Shape legend: B batch, T tokens, H query heads, G key heads, D head width.
"""

# Triton's own annotations hide the launch grid and the keyword-only launch options:
# pyright: reportCallIssue=false, reportArgumentType=false

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from orl_core.tiles import TileLists, tile_map
from orl_core.visibility import Visibility
from orl_train.attention.errors import AttentionBackendError
from orl_train.attention.triton_kernel import forward_kernel, key_gradient_kernel, query_gradient_kernel

TILE = 64
NARROW_TILE = 32
HEAD_DIMS = (16, 32, 64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def launch_options(kernel: JITFunction, head_dim: int) -> dict[str, int | bool]:
    """Warps and pipeline stages with which no kernel spills registers on sm_90, sm_100 or sm_120."""
    wide = kernel is key_gradient_kernel or head_dim > 64
    return {"num_warps": 8 if wide else 4, "num_stages": 2, "enable_fp_fusion": True}


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """attributes int32 [B or 1, 4, T]; the lists name the tiles that hold work.

    by_query: key tiles (of `tile` tokens) of each query tile (of `tile`); by_key: query tiles (of `narrow_tile`, since
    the key kernel keeps two accumulators in registers) of each key tile (of `tile`).
    """

    attributes: Tensor
    by_query: TileLists
    by_key: TileLists
    tile: int
    narrow_tile: int


def triton_plan(visibility: Visibility, tile: int = TILE, narrow_tile: int = NARROW_TILE) -> TritonPlan:
    """The plan of attributes [T] or [B, T]. Tiles are powers of two from 16 on."""
    columns = (visibility.segment, visibility.position, visibility.state, visibility.limit)
    attributes = torch.stack(columns, -2).int()
    return TritonPlan(
        attributes=attributes if attributes.dim() == 3 else attributes[None],
        by_query=tile_map(visibility, tile, tile).by_query(),
        by_key=tile_map(visibility, narrow_tile, tile).by_key(),
        tile=tile,
        narrow_tile=narrow_tile,
    )


def triton_attention(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, plan: TritonPlan, scale: float) -> Tensor:
    """[B, H, T, D], differentiable. Raises AttentionBackendError for a head width or dtype without a kernel."""
    if q_BHTD.shape[-1] not in HEAD_DIMS or q_BHTD.dtype not in DTYPES:
        raise AttentionBackendError(
            f"the triton attention takes head widths {HEAD_DIMS} and dtypes {DTYPES}, not {q_BHTD.shape[-1]} and "
            f"{q_BHTD.dtype}; choose the sparse, flex or reference backend"
        )
    out = _StaircaseAttention.apply(q_BHTD, k_BGTD, v_BGTD, plan, scale)
    assert isinstance(out, Tensor)
    return out


class _StaircaseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        q, k, v = (_dense_rows(x) for x in (q, k, v))
        batch, heads, length, _ = q.shape
        out = _empty_like(q)
        lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
        forward_kernel[(triton.cdiv(length, plan.tile), batch * heads)](
            q, k, v, out, lse, plan.attributes, *_lists(plan.by_query), scale * math.log2(math.e),
            *_strides(q, k, v, out), *_row_strides(plan), heads, length,
            **_constants(forward_kernel, q, k, plan),
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx, *grads):
        q, k, v, out, lse = ctx.saved_tensors
        plan, scale, grad = ctx.plan, ctx.scale, _dense_rows(grads[0])
        batch, heads, length, _ = q.shape
        tiles, scale2 = triton.cdiv(length, plan.tile), scale * math.log2(math.e)
        q_grad, k_grad, v_grad, delta = _empty_like(q), _empty_like(k), _empty_like(v), torch.empty_like(lse)
        query_gradient_kernel[(tiles, batch * heads)](
            q, k, v, out, grad, lse, delta, q_grad, plan.attributes, *_lists(plan.by_query), scale2, scale,
            *_strides(q, k, v, out, grad, q_grad), *_row_strides(plan), heads, length,
            **_constants(query_gradient_kernel, q, k, plan),
        )  # fmt: skip
        key_gradient_kernel[(tiles, batch * k.shape[1])](
            q, k, v, grad, lse, delta, k_grad, v_grad, plan.attributes, *_lists(plan.by_key), scale2, scale,
            *_strides(q, k, v, grad, k_grad), *_row_strides(plan), heads, length,
            QUERY_TILE=plan.narrow_tile, **_constants(key_gradient_kernel, q, k, plan),
        )  # fmt: skip
        return q_grad, k_grad, v_grad, None, None


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _empty_like(x_BHTD: Tensor) -> Tensor:
    """[B, H, T, D] laid out as [B, T, H, D], which the output projection reads without a copy."""
    batch, heads, length, width = x_BHTD.shape
    return torch.empty(batch, length, heads, width, dtype=x_BHTD.dtype, device=x_BHTD.device).transpose(1, 2)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _lists(lists: TileLists) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return lists.start, lists.middle, lists.end, lists.index


def _row_strides(plan: TritonPlan) -> tuple[int, int]:
    """Strides between rows of the batch in the attributes and the tile lists; 0 where all rows share one."""
    rows, _, length = plan.attributes.shape
    return (0, 0) if rows == 1 else (4 * length, triton.cdiv(length, plan.tile))


def _constants(kernel: JITFunction, q: Tensor, k: Tensor, plan: TritonPlan) -> dict[str, int | bool]:
    width = q.shape[-1]
    return {"GROUP": q.shape[1] // k.shape[1], "D": width, "TILE": plan.tile, **launch_options(kernel, width)}

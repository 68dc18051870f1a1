"""Staircase attention: one visibility, four ways to compute it.

reference  dense mask; any device and dtype, quadratic memory
sparse     block-sparse PyTorch; the fast one on CPU
triton     fused kernel, forward and backward; the fast one on CUDA
flex       FlexAttention
Shape legend: B batch, T tokens, H query heads, G key heads, D head width.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from orl_core.errors import ShapeError
from orl_core.visibility import Visibility
from orl_train.attention.errors import AttentionBackendError
from orl_train.attention.reference import dense_attention, dense_mask
from orl_train.attention.sparse_cpu import sparse_attention, sparse_plan

Backend = Literal["reference", "sparse", "triton", "flex"]

__all__ = ["AttentionBackendError", "AttentionPlan", "Backend", "attention_plan", "staircase_attention"]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What a backend derives from a visibility; made once per pack, used by every layer."""

    backend: Backend
    batch: int
    length: int
    payload: Any
    visibility: Visibility


def attention_plan(
    visibility: Visibility, *, batch: int, device: torch.device, backend: Backend | Literal["auto"] = "auto"
) -> AttentionPlan:
    """The plan of attributes [T] (shared by the batch) or [B, T]. "auto" is triton on CUDA and sparse elsewhere.

    Raises AttentionBackendError for an unknown backend or one that is not installed, ShapeError for another batch.
    """
    if backend == "auto":
        backend = "triton" if device.type == "cuda" else "sparse"
    if backend not in get_args(Backend):
        raise AttentionBackendError(
            f"attention backend {backend!r} is unknown; choose auto, {', '.join(get_args(Backend))}"
        )
    shape = visibility.segment.shape
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] != batch):
        raise ShapeError(f"visibility has shape {tuple(shape)}; a batch of {batch} needs [T] or [{batch}, T]")
    attributes = (visibility.segment, visibility.position, visibility.state, visibility.limit)
    visibility = Visibility(*(x.to(device) for x in attributes))
    if backend == "reference":
        payload = dense_mask(visibility)
    elif backend == "sparse":
        payload = sparse_plan(visibility, batch)
    elif backend == "triton":
        payload = _module("triton_attention").triton_plan(visibility)
    else:
        payload = _module("flex").flex_block_mask(visibility)
    return AttentionPlan(backend, batch, shape[-1], payload, visibility)


def staircase_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility | AttentionPlan,
    *,
    scale: float | None = None,
    backend: Backend | Literal["auto"] = "auto",
) -> Tensor:
    """Attention of packed tokens under block-diffusion visibility.

    q: [B, H, T, D]; k, v: [B, G, T, D] with H a multiple of G (query head h reads key head h // (H / G)).
    visibility: attributes [T] or [B, T], or a plan made once for several layers (then `backend` is the plan's).
    scale: D^-0.5 by default. Returns [B, H, T, D] in the dtype of q; differentiable in q, k and v.
    Raises ShapeError for tensors that do not match, AttentionBackendError for a backend that cannot run here.
    """
    plan = visibility
    if isinstance(plan, Visibility):
        plan = attention_plan(plan, batch=q.shape[0], device=q.device, backend=backend)
    _check(q, k, v, plan)
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    if plan.backend == "reference":
        return dense_attention(q, k, v, plan.payload, scale)
    if plan.backend == "sparse":
        return sparse_attention(q, k, v, plan.payload, scale)
    if plan.backend == "triton":
        return _module("triton_attention").triton_attention(q, k, v, plan.payload, scale)
    return _module("flex").flex_masked_attention(q, k, v, plan.payload, scale)


def _module(name: str) -> Any:
    """Imports a backend that needs an optional package only when it is asked for."""
    try:
        return importlib.import_module(f"orl_train.attention.{name}")
    except ImportError as error:
        raise AttentionBackendError(
            f"the {name.removesuffix('_attention')} attention backend cannot be imported ({error}); install triton, or "
            "choose the sparse or reference backend"
        ) from error


def _check(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
    wanted = f"q [{plan.batch}, H, {plan.length}, D] and k, v [{plan.batch}, G, {plan.length}, D], H a multiple of G"
    fits = (
        q.dim() == k.dim() == 4
        and k.shape == v.shape
        and (q.shape[0], q.shape[2]) == (plan.batch, plan.length)
        and (k.shape[0], k.shape[2], k.shape[3]) == (plan.batch, plan.length, q.shape[3])
        and q.shape[1] % k.shape[1] == 0
    )
    if not fits:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ShapeError(f"q, k, v have shapes {shapes}; this visibility needs {wanted}")
    if not q.dtype == k.dtype == v.dtype:
        raise ShapeError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; they must agree")

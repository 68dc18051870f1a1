"""Staircase attention as a FlexAttention block mask, made from the tile map without evaluating a dense mask."""

import functools

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from orl_core.tiles import TileKind, mask_mod, tile_map
from orl_core.visibility import Visibility
from orl_train.attention.errors import AttentionBackendError

TILE = 128


def flex_block_mask(visibility: Visibility, tile: int = TILE) -> BlockMask:
    """The block mask of attributes [T] or [B, T]: full blocks skip the predicate, empty ones are skipped."""
    tiles = tile_map(visibility, tile, tile)
    partial = _counts_and_indices(tiles.kind == TileKind.PARTIAL)
    full = _counts_and_indices(tiles.kind == TileKind.FULL)
    return BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=tile, mask_mod=mask_mod(visibility), seq_lengths=(tiles.length, tiles.length)
    )


def flex_masked_attention(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """[B, H, T, D]. Compiled on CUDA; elsewhere PyTorch's own unfused evaluation, which is meant for tests.

    Raises AttentionBackendError where a gradient is asked for on CPU: PyTorch has none for FlexAttention there.
    """
    if (
        q_BHTD.device.type == "cpu"
        and torch.is_grad_enabled()
        and any(x.requires_grad for x in (q_BHTD, k_BGTD, v_BGTD))
    ):
        raise AttentionBackendError("FlexAttention has no backward pass on cpu; choose the sparse or reference backend")
    attend = _compiled() if q_BHTD.is_cuda else flex_attention
    grouped = q_BHTD.shape[1] != k_BGTD.shape[1]
    out = attend(q_BHTD, k_BGTD, v_BGTD, block_mask=mask, scale=scale, enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out


@functools.cache
def _compiled():
    return torch.compile(flex_attention, dynamic=True)


def _counts_and_indices(held_BIJ: Tensor) -> tuple[Tensor, Tensor]:
    """Number of held blocks of each row and their indices first, int32 [B, 1, I] and [B, 1, I, J]."""
    order = held_BIJ.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return held_BIJ.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]

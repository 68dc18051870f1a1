"""Block-diffusion ("staircase") visibility: one predicate from which every mask and tile map is derived.

Each token of a packed sequence carries four integers:

segment   which response (and its prompt) the token belongs to; tokens of other segments are never visible
position  its position in that response
state     0 for the clean context, n > 0 for the n-th noisy state packed beside it
limit     how much clean context it sees: the clean tokens of its segment with position < limit

A query sees a key iff both are in one segment and the key is clean with position < limit(query), or both belong to the
same noisy state. So a causal context has limit = position + 1, a block-causal one limit = end of its block, and a noisy
block starting at s has limit = s: it sees neither its own clean answer, nor later blocks, nor any other state.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from orl_core.errors import ShapeError, require_at_least, require_range

PADDING_SEGMENT = -1


@dataclass(frozen=True, slots=True)
class Visibility:
    """The four attributes of each token, int64 [..., T] each. A segment of -1 is padding: it sees only itself."""

    segment: Tensor
    position: Tensor
    state: Tensor
    limit: Tensor

    def __post_init__(self) -> None:
        shapes = {tuple(t.shape) for t in (self.segment, self.position, self.state, self.limit)}
        if len(shapes) != 1:
            raise ShapeError(f"segment, position, state and limit have shapes {sorted(shapes)}; they must agree")

    def dense_mask(self) -> Tensor:
        """bool [..., T, T], True where query (row) may attend to key (column). Every row has at least one True."""
        q = (self.segment[..., :, None], self.state[..., :, None], self.limit[..., :, None])
        k = (self.segment[..., None, :], self.position[..., None, :], self.state[..., None, :])
        mask = is_visible(*q, *k)
        eye = torch.eye(self.segment.shape[-1], dtype=torch.bool, device=mask.device)
        return mask | (eye & (self.segment == PADDING_SEGMENT)[..., None])


def is_visible(segment_q, state_q, limit_q, segment_k, position_k, state_k):
    """The predicate; works elementwise on tensors (or Python ints) that broadcast."""
    clean_key = (state_k == 0) & (position_k < limit_q)
    own_state = (state_k == state_q) & (state_q != 0)
    return (segment_q == segment_k) & (segment_q != PADDING_SEGMENT) & (clean_key | own_state)


def block_start(position: Tensor, first_block: Tensor | int, block_length: int) -> Tensor:
    """Start of the block that holds `position`, for blocks laid from `first_block` on.

    The positions before `first_block` form one block that starts at 0.
    """
    offset = position - first_block
    start = first_block + offset.div(block_length, rounding_mode="floor") * block_length
    return torch.where(offset < 0, torch.zeros_like(position), start)


def staircase(
    length: int,
    prompt_length: int,
    block_length: int,
    *,
    clean_length: int | None = None,
    block_causal: bool = False,
    device: torch.device | None = None,
) -> Visibility:
    """Visibility of one response trained in one forward over [clean 0..clean_length | noisy prompt_length..length].

    length: prompt + answer tokens. Noisy tokens exist only for the answer; blocks are laid from prompt_length on.
    clean_length: clean tokens present (default: all); the last block is nobody's context and may be left out.
    block_causal: clean answer tokens see their whole block (LLaDA2, SDAR) instead of being token-causal (QwenDLM).
    Returns int64 attributes [clean_length + length - prompt_length].
    """
    require_at_least("block_length", block_length, 1)
    require_range("prompt_length", prompt_length, 0, length)
    clean_length = length if clean_length is None else clean_length
    last_start = prompt_length + max(0, length - prompt_length - 1) // block_length * block_length
    require_range("clean_length", clean_length, last_start, length)
    clean = torch.arange(clean_length, device=device)
    noisy = torch.arange(prompt_length, length, device=device)
    noisy_start = block_start(noisy, prompt_length, block_length)
    if block_causal:
        start = block_start(clean, prompt_length, block_length)
        clean_limit = torch.where(clean < prompt_length, prompt_length, start + block_length).clamp(max=length)
    else:
        clean_limit = clean + 1
    state = (noisy - prompt_length).div(block_length, rounding_mode="floor") + 1
    position = torch.cat([clean, noisy])
    return Visibility(
        segment=torch.zeros_like(position),
        position=position,
        state=torch.cat([torch.zeros_like(clean), state]),
        limit=torch.cat([clean_limit, noisy_start]),
    )

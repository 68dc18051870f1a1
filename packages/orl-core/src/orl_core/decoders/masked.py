"""What the decoders of the masked family share: masked canvases and the choice of positions to commit."""

import torch
from torch import Tensor

from orl_core.decoders.base import CanvasState, rank_descending, start_state
from orl_core.entropy import TokenStats
from orl_core.errors import ShapeError


def masked_canvas(fixed_BC: Tensor, editable_BC: Tensor, mask_id: int, canvas_length: int) -> CanvasState:
    """A canvas of [MASK] with the prompt's tokens where they are fixed; at most `canvas_length` positions."""
    if fixed_BC.shape[-1] > canvas_length:
        raise ShapeError(
            f"the block has {fixed_BC.shape[-1]} positions but the decoder was built with canvas_length = "
            f"{canvas_length}; build it with the model's canvas length"
        )
    return start_state(torch.where(editable_BC, torch.full_like(fixed_BC, mask_id), fixed_BC), editable_BC)


def positions_to_commit(stats: TokenStats, unresolved_BC: Tensor, threshold: float, quota_B: Tensor) -> Tensor:
    """bool [B, C]: unresolved positions with candidate probability > threshold, or the `quota_B` most confident
    ones where fewer than that qualify."""
    confidence_BC = torch.where(unresolved_BC, stats.candidate_prob, torch.full_like(stats.candidate_prob, -1.0))
    above_BC = confidence_BC > threshold
    top_BC = (rank_descending(confidence_BC) < quota_B[:, None]) & unresolved_BC
    enough_B = above_BC.sum(-1) >= quota_B
    return torch.where(enough_B[:, None], above_BC, top_BC)

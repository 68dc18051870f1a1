"""Staircase attention over the dense mask: the definition that every other backend is tested against."""

import torch.nn.functional as F
from torch import Tensor

from orl_core.visibility import Visibility


def dense_attention(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask_BTT: Tensor, scale: float) -> Tensor:
    """softmax(scale * q k^T where visible) v with H / G query heads per key head, [B, H, T, D]; any float dtype."""
    grouped = q_BHTD.shape[1] != k_BGTD.shape[1]
    mask = mask_BTT.unsqueeze(-3)
    return F.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, attn_mask=mask, scale=scale, enable_gqa=grouped)


def dense_mask(visibility: Visibility) -> Tensor:
    """bool [T, T] or [B, T, T]."""
    return visibility.dense_mask()

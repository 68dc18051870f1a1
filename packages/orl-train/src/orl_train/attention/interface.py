"""Staircase attention under transformers' attention interface: `attn_implementation="staircase"`.

A model so loaded takes an AttentionPlan, or a bool mask, as its attention mask.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from orl_train.attention import AttentionPlan, staircase_attention

NAME = "staircase"


def staircase_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: "AttentionPlan | Tensor | None",
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H, T, D], key and value [B, G, T, D] -> [B, T, H, D]; dropout is not supported.

    Under autocast a rotation by float32 angles has lifted query and key out of its dtype. On CUDA they return to it; on
    a CPU, whose fused attention is slower in bfloat16, the values follow them.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype("cuda") if query.is_cuda else query.dtype
        query, key, value = (x.to(dtype) for x in (query, key, value))
    if isinstance(attention_mask, AttentionPlan):
        return staircase_attention(query, key, value, attention_mask, scale=scaling).transpose(1, 2), None
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, staircase_forward)
AttentionMaskInterface.register(NAME, eager_mask)

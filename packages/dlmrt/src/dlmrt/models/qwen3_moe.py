"""The mixture-of-experts feed-forward part of Qwen3-MoE and SDAR-MoE checkpoints.

Shape legend: B rows, T tokens, N = B * T, d width, E experts, K experts a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dlmrt.checkpoint.config import Fields
from dlmrt.errors import ModelConfigError
from dlmrt.models.experts import Experts, expert_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """normalise: the weights of a token's experts sum to 1. sparse: which layers have experts, not a dense MLP."""

    experts: int
    top_k: int
    width: int
    normalise: bool
    sparse: tuple[bool, ...]

    @classmethod
    def from_fields(cls, fields: Fields, layers: int) -> "MoeConfig":
        """Raises ModelConfigError that names the key. Files written by transformers 5 say num_local_experts."""
        experts = fields.integer("num_local_experts" if "num_local_experts" in fields.raw else "num_experts")
        step, dense = fields.integer("decoder_sparse_step", default=1), fields.raw.get("mlp_only_layers") or []
        if not all(isinstance(index, int) for index in dense):
            raise ModelConfigError(f"config.json has mlp_only_layers = {dense!r}; it must be a list of layer indices")
        return cls(
            experts=experts,
            top_k=fields.integer("num_experts_per_tok", high=experts),
            width=fields.integer("moe_intermediate_size"),
            normalise=fields.boolean("norm_topk_prob", default=False),
            sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        )

    def shapes(self, prefix: str, d: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of one layer's router and experts."""
        return {f"{prefix}gate.weight": (self.experts, d)} | expert_shapes(
            f"{prefix}experts.", self.experts, d, self.width
        )


class SparseMlp:
    """Softmax over all experts of a linear router, then the weighted sum of the K most probable ones."""

    def __init__(self, config: MoeConfig, tensors: Mapping[str, Tensor], prefix: str, *, fuse: bool) -> None:
        self.config, self.gate = config, tensors[f"{prefix}gate.weight"]
        self.experts = Experts.from_checkpoint(tensors, f"{prefix}experts.", config.experts, fuse=fuse)

    def __call__(self, x_BTd: Tensor) -> Tensor:
        x_Nd = x_BTd.flatten(0, 1)
        prob_NE = F.linear(x_Nd, self.gate).softmax(-1, dtype=torch.float32)
        weight_NK, index_NK = prob_NE.topk(self.config.top_k, -1)
        if self.config.normalise:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        return self.experts(x_Nd, index_NK, weight_NK).view_as(x_BTd)

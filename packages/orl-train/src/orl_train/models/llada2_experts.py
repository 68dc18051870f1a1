"""Feed-forward parts of LLaDA2.x: gated MLP, group-limited sigmoid router, routed and shared experts.

Shape legend: N tokens, d width, E experts, G groups, K experts per token.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from orl_train.models.llada2_config import LLaDA2MoeConfig


class LLaDA2MLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: LLaDA2MoeConfig, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class LLaDA2Router(nn.Module):
    """Group-limited top-k routing in float32 (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; LLaDA2 reference code).

    s = sigmoid(W x). Experts are chosen by s + expert_bias: a group scores the sum of its two best, the best
    `topk_group` groups are kept, and of their experts the best K. The weights use s without the bias:
    w = s / (sum of the chosen s + 1e-20) * routed_scaling_factor.
    """

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__()
        self.groups, self.kept_groups = config.n_group, config.topk_group
        self.top_k, self.scaling = config.num_experts_per_tok, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.expert_bias: Tensor
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x_Nd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(chosen experts int64 [N, K], their weights float32 [N, K], logits float32 [N, E])."""
        logits_NE = F.linear(x_Nd.float(), self.weight.float())
        score_NE = logits_NE.sigmoid()
        biased_NGe = (score_NE + self.expert_bias.float()).unflatten(-1, (self.groups, -1))
        group_score_NG = biased_NGe.topk(min(2, biased_NGe.shape[-1]), -1).values.sum(-1)
        best_groups = group_score_NG.topk(self.kept_groups, -1).indices
        kept_NG = torch.zeros_like(group_score_NG, dtype=torch.bool).scatter(-1, best_groups, True)
        candidates_NE = biased_NGe.masked_fill(~kept_NG[..., None], float("-inf")).flatten(-2)
        index_NK = candidates_NE.topk(self.top_k, -1).indices
        weight_NK = score_NE.gather(-1, index_NK)
        if self.top_k > 1:
            weight_NK = weight_NK / (weight_NK.sum(-1, keepdim=True) + 1e-20)
        return index_NK, weight_NK * self.scaling, logits_NE


class LLaDA2SparseMoe(nn.Module):
    """Routed experts plus the unscaled shared expert."""

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__()
        self.experts = nn.ModuleList(LLaDA2MLP(config, config.moe_intermediate_size) for _ in range(config.num_experts))
        self.gate = LLaDA2Router(config)
        shared = config.moe_intermediate_size * config.num_shared_experts
        self.shared_experts = LLaDA2MLP(config, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        x_Nd = x.flatten(0, -2)
        index_NK, weight_NK, _ = self.gate(x_Nd)
        y = self.routed(x_Nd, index_NK, weight_NK).view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)

    def routed(self, x_Nd: Tensor, index_NK: Tensor, weight_NK: Tensor) -> Tensor:
        """sum_k w_k expert_k(x), accumulated in the dtype of the weights, returned in that of x.

        Every expert runs, on no tokens if none chose it, so that each rank of a data-parallel run has the same
        parameters with gradients.
        """
        order = index_NK.flatten().argsort(stable=True)
        counts = torch.bincount(index_NK.flatten(), minlength=len(self.experts)).tolist()
        parts = x_Nd[order // index_NK.shape[-1]].split(counts)
        outputs = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        y_NKd = outputs[order.argsort()].unflatten(0, index_NK.shape)
        return (y_NKd.to(weight_NK.dtype) * weight_NK[..., None]).sum(-2).to(x_Nd.dtype)

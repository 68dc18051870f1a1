"""LLaDA2.0 and 2.1: mixture-of-experts denoisers of the masked family over a block-causal context.

Numerics follow the published reference code; weight names are those of its checkpoints, plus `residual_adapter.*`.
Shape legend: B rows, T tokens, N = B * T, C canvas, H heads, D head width, d width, E experts, G groups, K experts a
token.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from dlmrt.cache import KVCache, Span
from dlmrt.models.adapter_model import AdapterModel
from dlmrt.models.experts import Experts
from dlmrt.models.layers import GatedMlp, attend, rms_norm, rotate
from dlmrt.models.llada2_config import LLaDA2Config


def route(x_Nd: Tensor, weight_Ed: Tensor, bias_E: Tensor, config: LLaDA2Config) -> tuple[Tensor, Tensor]:
    """Group-limited top-k routing in float32: (chosen experts int64 [N, K], their weights float32 [N, K]).

    s = sigmoid(W x). Experts are chosen by s + bias: a group scores the sum of its two best, the best `topk_group`
    groups are kept, and of their experts the best K. The weights use s without the bias:
    w = s / (sum of the chosen s + 1e-20) * routed_scaling_factor (DeepSeek-V3, arXiv 2412.19437; LLaDA2 reference).
    """
    score_NE = F.linear(x_Nd.float(), weight_Ed.float()).sigmoid()
    biased_NGe = (score_NE + bias_E.float()).unflatten(-1, (config.n_group, -1))
    group_NG = biased_NGe.topk(min(2, biased_NGe.shape[-1]), -1).values.sum(-1)
    kept = group_NG.topk(config.topk_group, -1).indices
    dropped_NG = torch.ones_like(group_NG, dtype=torch.bool).scatter(-1, kept, False)
    candidates_NE = biased_NGe.masked_fill(dropped_NG[..., None], float("-inf")).flatten(-2)
    index_NK = candidates_NE.topk(config.num_experts_per_tok, -1).indices
    weight_NK = score_NE.gather(-1, index_NK)
    if config.num_experts_per_tok > 1:
        weight_NK = weight_NK / (weight_NK.sum(-1, keepdim=True) + 1e-20)
    return index_NK, weight_NK * config.routed_scaling_factor


class _SparseMlp:
    """Routed experts plus the shared expert, which is added unscaled."""

    def __init__(self, config: LLaDA2Config, tensors: Mapping[str, Tensor], prefix: str, fuse: bool) -> None:
        self.config = config
        self.gate, self.bias = tensors[f"{prefix}gate.weight"], tensors[f"{prefix}gate.expert_bias"]
        self.experts = Experts.from_checkpoint(tensors, f"{prefix}experts.", config.num_experts, fuse=fuse)
        self.shared = GatedMlp(tensors, f"{prefix}shared_experts.", fuse=fuse) if config.num_shared_experts else None

    def __call__(self, x_BTd: Tensor) -> Tensor:
        x_Nd = x_BTd.flatten(0, 1)
        y_BTd = self.experts(x_Nd, *route(x_Nd, self.gate, self.bias, self.config)).view_as(x_BTd)
        return y_BTd if self.shared is None else y_BTd + self.shared(x_BTd)


class _Layer:
    """Attention and feed-forward part, each behind an RMSNorm; rotary turns the first dimensions of a head only."""

    def __init__(self, config: LLaDA2Config, tensors: Mapping[str, Tensor], index: int, fuse: bool) -> None:
        prefix = f"model.layers.{index}."
        self.index, self.config, self.scale = index, config, config.head_dim**-0.5
        self.input_norm = tensors[f"{prefix}input_layernorm.weight"]
        self.post_norm = tensors[f"{prefix}post_attention_layernorm.weight"]
        self.qkv = tensors[f"{prefix}attention.query_key_value.weight"]
        self.out = tensors[f"{prefix}attention.dense.weight"]
        self.q_norm = tensors.get(f"{prefix}attention.query_layernorm.weight")
        self.k_norm = tensors.get(f"{prefix}attention.key_layernorm.weight")
        dense = index < config.first_k_dense_replace
        sparse = None if dense else _SparseMlp(config, tensors, f"{prefix}mlp.", fuse)
        self.mlp = sparse or GatedMlp(tensors, f"{prefix}mlp.", fuse=fuse)

    def _turn(self, x_BTHD: Tensor, norm: Tensor | None, rotary: tuple[Tensor, Tensor]) -> Tensor:
        if norm is not None:
            x_BTHD = rms_norm(x_BTHD, norm, self.config.rms_norm_eps)
        turned, kept = x_BTHD.tensor_split((self.config.rotary_width,), -1)
        return torch.cat((rotate(turned, *rotary), kept), -1)

    def write_keys(self, x_BTd: Tensor, rotary: tuple[Tensor, Tensor], span: Span, cache: KVCache):
        """Queries [B, T, H, D], and the cache views of all keys and values after writing this span's."""
        config = self.config
        qkv = F.linear(rms_norm(x_BTd, self.input_norm, config.rms_norm_eps), self.qkv)
        kv = config.num_key_value_heads
        q, k, v = qkv.unflatten(-1, (-1, config.head_dim)).split((config.num_attention_heads, kv, kv), 2)
        k = self._turn(k, self.k_norm, rotary)
        return self._turn(q, self.q_norm, rotary), *cache.write(self.index, k, v, span)

    def __call__(self, x_BTd: Tensor, rotary: tuple[Tensor, Tensor], span: Span, cache: KVCache) -> Tensor:
        q, keys, values = self.write_keys(x_BTd, rotary, span, cache)
        x_BTd = x_BTd + F.linear(attend(q, keys, values, span, scale=self.scale), self.out)
        return x_BTd + self.mlp(rms_norm(x_BTd, self.post_norm, self.config.rms_norm_eps))


class LLaDA2(AdapterModel):
    """See `BlockModel`."""

    config_class = LLaDA2Config
    embedding_name = "model.word_embeddings.weight"
    layer_class = _Layer

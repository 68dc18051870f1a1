"""DiffusionGemma, text only: an encoder that writes the KV cache and a decoder that denoises a canvas over it.

Both share their weights, except for one scalar a layer. Numerics and weight names follow transformers'
DiffusionGemmaForBlockDiffusion. Shape legend: B rows, T tokens, N = B * T, C canvas, H heads, D head width, d width.
"""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from dlmrt.cache import KVCache, Span
from dlmrt.models.base import BlockModel
from dlmrt.models.diffusion_gemma_config import LAYER_NORMS, AttentionConfig, DiffusionGemmaConfig
from dlmrt.models.experts import Experts
from dlmrt.models.layers import GatedMlp, RotaryTable, StackedLinear, attend, gelu_tanh, rms_norm, rotate
from orl_core.residual import add_residual

Rotary = dict[AttentionConfig, tuple[Tensor, Tensor]]


class _Router:
    """Softmax of a projection of the normalised residual stream; of it the top-k, renormalised and scaled."""

    def __init__(self, config: DiffusionGemmaConfig, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self.config = config
        self.proj, self.scale = tensors[f"{prefix}proj.weight"], tensors[f"{prefix}scale"]
        self.expert_scale = tensors[f"{prefix}per_expert_scale"]

    def __call__(self, x_Nd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(chosen experts int64 [N, K], their weights float32 [N, K], probabilities float32 [N, E])."""
        x_Nd = rms_norm(x_Nd, None, self.config.rms_norm_eps) * self.scale * self.config.hidden_size**-0.5
        prob_NE = F.linear(x_Nd, self.proj).softmax(-1, dtype=torch.float32)
        weight_NK, index_NK = prob_NE.topk(self.config.top_k_experts, -1)
        weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        return index_NK, weight_NK * self.expert_scale[index_NK], prob_NE


class _Layer:
    """Attention, then a dense MLP and routed experts side by side; every part has a norm before and after it.

    QK-norm comes before rotary, values pass a weightless norm, and the attention scale is 1. A full layer has no value
    projection: its values are its keys before their norm and rotary.
    """

    def __init__(self, config: DiffusionGemmaConfig, tensors: Mapping[str, Tensor], index: int, fuse: bool) -> None:
        prefix = f"model.decoder.layers.{index}."

        def weight(name: str) -> Tensor:
            return tensors[f"{prefix}{name}.weight"]

        self.index, self.eps, self.attention = index, config.rms_norm_eps, config.attention[index]
        self.norms = {name: weight(name) for name in LAYER_NORMS}
        self.q_norm, self.k_norm = weight("self_attn.q_norm"), weight("self_attn.k_norm")
        projections = "qkv" if self.attention.window is not None else "qk"
        self.qkv = StackedLinear([weight(f"self_attn.{n}_proj") for n in projections], fuse=fuse)
        self.out = weight("self_attn.o_proj")
        self.mlp = GatedMlp(tensors, f"{prefix}mlp.", fuse=fuse, act=gelu_tanh)
        self.router = _Router(config, tensors, f"{prefix}router.")
        gate_up, down = tensors[f"{prefix}experts.gate_up_proj"], tensors[f"{prefix}experts.down_proj"]
        self.experts = Experts([gate_up], [down], act=gelu_tanh)
        self.encoder_scalar = tensors[f"model.encoder.language_model.layers.{index}.layer_scalar"]
        self.decoder_scalar = tensors[f"{prefix}layer_scalar"]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.norms[name], self.eps)

    def write_keys(self, x_BTd: Tensor, rotary: Rotary, span: Span, cache: KVCache):
        """Queries [B, T, H, D], and the cache views of all keys and values after writing this span's."""
        cos, sin = rotary[self.attention]
        heads = (*x_BTd.shape[:-1], -1, self.attention.head_dim)
        q, k, *v = (part.view(heads) for part in self.qkv(self._norm(x_BTd, "input_layernorm")))
        values = rms_norm(v[0] if v else k, None, self.eps)
        q = rotate(rms_norm(q, self.q_norm, self.eps), cos, sin)
        k = rotate(rms_norm(k, self.k_norm, self.eps), cos, sin)
        return q, *cache.write(self.index, k, values, span)

    def __call__(self, x_BTd: Tensor, rotary: Rotary, span: Span, cache: KVCache, scalar: Tensor) -> Tensor:
        q, keys, values = self.write_keys(x_BTd, rotary, span, cache)
        attended = attend(q, keys, values, span, scale=1.0, window=self.attention.window)
        x_BTd = x_BTd + self._norm(F.linear(attended, self.out), "post_attention_layernorm")
        return (x_BTd + self._feed_forward(x_BTd)) * scalar

    def _feed_forward(self, x_BTd: Tensor) -> Tensor:
        dense = self._norm(self.mlp(self._norm(x_BTd, "pre_feedforward_layernorm")), "post_feedforward_layernorm_1")
        index_NK, weight_NK, _ = self.router(x_BTd.flatten(0, 1))
        x_Nd = self._norm(x_BTd, "pre_feedforward_layernorm_2").flatten(0, 1)
        routed = self.experts(x_Nd, index_NK, weight_NK).view_as(x_BTd)
        routed = self._norm(routed, "post_feedforward_layernorm_2")
        return self._norm(dense + routed, "post_feedforward_layernorm")


class DiffusionGemma(BlockModel):
    """See `BlockModel`. The residual context is the model's own self-conditioning signal."""

    config_class = DiffusionGemmaConfig

    def __init__(self, config: DiffusionGemmaConfig, tensors: Mapping[str, Tensor], *, fuse: bool) -> None:
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.config, self.spec = config, config.spec
        self.embedding = self.head = tensors["model.decoder.embed_tokens.weight"]
        # The reference multiplies by the scale in the dtype of the weights.
        self.embedding_scale = float(torch.tensor(config.hidden_size**0.5, dtype=self.dtype))
        self.softcap = config.final_logit_softcapping
        self.norm = tensors["model.decoder.norm.weight"]
        self.layers = [_Layer(config, tensors, index, fuse) for index in range(len(config.attention))]
        self.rotary = {attention: self._rotary_table(attention) for attention in set(config.attention)}
        self.signal_norm = tensors["model.decoder.self_conditioning.pre_norm.weight"]
        self.signal_mlp = GatedMlp(tensors, "model.decoder.self_conditioning.", fuse=fuse, act=gelu_tanh)

    @classmethod
    def from_tensors(cls, config: DiffusionGemmaConfig, tensors: Mapping[str, Tensor], *, fuse: bool = True) -> Self:
        return cls(config, tensors, fuse=fuse)

    def _rotary_table(self, attention: AttentionConfig) -> RotaryTable:
        """Frequencies theta^(-2i / D); a full layer turns only the first `rope_factor` of its pairs."""
        exponent = torch.arange(0, attention.head_dim, 2, dtype=torch.float32, device=self.device) / attention.head_dim
        inv_freq = 1.0 / attention.rope_theta**exponent
        inv_freq[int(attention.rope_factor * attention.head_dim // 2) :] = 0.0
        return RotaryTable(inv_freq, self.dtype)

    def _embed(self, ids_BT: Tensor) -> Tensor:
        return F.embedding(ids_BT, self.embedding) * self.embedding_scale

    def encode(self, ids_BT: Tensor, span: Span, cache: KVCache) -> None:
        x_BTd, rotary = self._embed(ids_BT), {kind: table.at(span) for kind, table in self.rotary.items()}
        for layer in self.layers[:-1]:
            x_BTd = layer(x_BTd, rotary, span, cache, layer.encoder_scalar)
        self.layers[-1].write_keys(x_BTd, rotary, span, cache)  # nothing reads the last layer's output

    def denoise(
        self, ids_BC: Tensor, z_BCd: Tensor | None, receives_BC: Tensor | None, span: Span, cache: KVCache
    ) -> Tensor:
        x_BCd, rotary = self._embed(ids_BC), {kind: table.at(span) for kind, table in self.rotary.items()}
        if z_BCd is not None and receives_BC is not None:
            signal_BCd = self.signal_mlp(rms_norm(z_BCd, self.signal_norm, self.config.rms_norm_eps))
            x_BCd = add_residual(x_BCd, signal_BCd, receives_BC)
        x_BCd = rms_norm(x_BCd, None, self.config.rms_norm_eps)
        for layer in self.layers:
            x_BCd = layer(x_BCd, rotary, span, cache, layer.decoder_scalar)
        return rms_norm(x_BCd, self.norm, self.config.rms_norm_eps)

"""Qwen3-family denoisers: QwenDLM (Qwen3 body, residual adapter), plain Qwen3 and SDAR, dense or with experts.

Numerics follow transformers' Qwen3ForCausalLM and Qwen3MoeForCausalLM; weight names are theirs, plus
`residual_adapter.*`.
Shape legend: B rows, T tokens, C canvas, H heads, D head width, d width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

from torch import Tensor
from torch.nn import functional as F

from dlmrt.cache import KVCache, Span
from dlmrt.checkpoint.config import Fields
from dlmrt.models.adapter_model import AdapterModel
from dlmrt.models.base import BlockSpec, ModelConfig
from dlmrt.models.layers import (
    GatedMlp,
    StackedLinear,
    attend,
    gated_mlp_shapes,
    residual_adapter_shapes,
    rms_norm,
    rotate,
)
from dlmrt.models.qwen3_moe import MoeConfig, SparseMlp
from orl_core.noise import Family

_PLAIN_CANVAS = 32
_SDAR_CANVAS, _SDAR_MASK = 4, 151669


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(ModelConfig):
    """The keys of config.json that the engine honours.

    A plain Qwen3 checkpoint has none of the last four and runs as a uniform-family denoiser without residual adapter.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    canvas_length: int
    state_family: Family
    mask_token_id: int | None
    residual_intermediate_size: int
    aligned_blocks: bool
    moe: MoeConfig | None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        fields = Fields(raw)
        fields.require("hidden_act", "silu")
        fields.require("attention_bias", False)
        fields.require("use_sliding_window", False)
        rope = fields.section("rope_parameters") or fields.section("rope_scaling")
        rope.require("rope_type", "default")
        model_type = raw.get("model_type")
        sdar = model_type in ("sdar", "sdar_moe")
        family = fields.choice("state_family", ("uniform", "masked"), default="masked" if sdar else "uniform")
        heads, width = fields.integer("num_attention_heads"), fields.integer("hidden_size")
        vocab_size, layers = fields.integer("vocab_size"), fields.integer("num_hidden_layers")
        mask_token_id = None
        if family == "masked":
            default = _SDAR_MASK if sdar else None
            mask_token_id = fields.integer("mask_token_id", default=default, low=0, high=vocab_size - 1)
        canvas_key = "block_size" if sdar and "block_size" in raw else "canvas_length"
        return cls(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=fields.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=fields.divisor("num_key_value_heads", heads, default=heads),
            head_dim=fields.integer("head_dim", default=width // heads),
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
            rope_theta=rope.number("rope_theta", default=fields.number("rope_theta", default=10000.0)),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
            canvas_length=fields.integer(canvas_key, default=_SDAR_CANVAS if sdar else _PLAIN_CANVAS),
            state_family=cast(Family, family),
            mask_token_id=mask_token_id,
            residual_intermediate_size=fields.integer("residual_intermediate_size", default=0, low=0),
            aligned_blocks=sdar,
            moe=MoeConfig.from_fields(fields, layers) if model_type in ("sdar_moe", "qwen3_moe") else None,
        )

    def moe_of(self, layer: int) -> MoeConfig | None:
        """The experts of this layer; None if its MLP is dense."""
        return self.moe if self.moe is not None and self.moe.sparse[layer] else None

    @property
    def rotary_width(self) -> int:
        """Leading dimensions of a head that are rotated: all of them."""
        return self.head_dim

    @property
    def spec(self) -> BlockSpec:
        return BlockSpec(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            canvas_length=self.canvas_length,
            max_context=self.max_position_embeddings,
            family=self.state_family,
            mask_token_id=self.mask_token_id,
            layout="aligned" if self.aligned_blocks else "prompt_end",
            commit="block_causal" if self.aligned_blocks else "causal",
            has_residual=self.residual_intermediate_size > 0,
            kv_layers=((self.num_key_value_heads, self.head_dim),) * self.num_hidden_layers,
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        d, m, D = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * D, self.num_key_value_heads * D
        layer = {
            "input_layernorm.weight": (d,),
            "self_attn.q_proj.weight": (q, d),
            "self_attn.k_proj.weight": (kv, d),
            "self_attn.v_proj.weight": (kv, d),
            "self_attn.o_proj.weight": (d, q),
            "self_attn.q_norm.weight": (D,),
            "self_attn.k_norm.weight": (D,),
            "post_attention_layernorm.weight": (d,),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, d)}
        for index in range(self.num_hidden_layers):
            prefix = f"model.layers.{index}."
            shapes |= {f"{prefix}{name}": shape for name, shape in layer.items()}
            moe = self.moe_of(index)
            shapes |= moe.shapes(f"{prefix}mlp.", d) if moe else gated_mlp_shapes(f"{prefix}mlp.", d, m)
        shapes["model.norm.weight"] = (d,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes | residual_adapter_shapes(d, self.residual_intermediate_size)

    def active_share(self, name: str) -> float:
        return self.moe.top_k / self.moe.experts if self.moe and ".mlp.experts." in name else 1.0

    def ignores(self, name: str) -> bool:
        return self.tie_word_embeddings and name == "lm_head.weight"


class _Layer:
    """One decoder layer: attention and MLP, each behind an RMSNorm, with QK-norm before rotary."""

    def __init__(self, config: Qwen3Config, tensors: Mapping[str, Tensor], index: int, fuse: bool) -> None:
        def weight(name: str) -> Tensor:
            return tensors[f"model.layers.{index}.{name}.weight"]

        self.index, self.eps, self.head_dim = index, config.rms_norm_eps, config.head_dim
        self.scale = config.head_dim**-0.5
        self.input_norm, self.post_norm = weight("input_layernorm"), weight("post_attention_layernorm")
        self.q_norm, self.k_norm = weight("self_attn.q_norm"), weight("self_attn.k_norm")
        self.qkv = StackedLinear([weight(f"self_attn.{n}_proj") for n in "qkv"], fuse=fuse)
        self.out = weight("self_attn.o_proj")
        prefix = f"model.layers.{index}.mlp."
        moe = config.moe_of(index)
        self.mlp = GatedMlp(tensors, prefix, fuse=fuse) if moe is None else SparseMlp(moe, tensors, prefix, fuse=fuse)

    def write_keys(self, x_BTd: Tensor, rotary: tuple[Tensor, Tensor], span: Span, cache: KVCache):
        """Queries [B, T, H, D], and the cache views of all keys and values after writing this span's."""
        heads = (*x_BTd.shape[:-1], -1, self.head_dim)
        q, k, v = self.qkv(rms_norm(x_BTd, self.input_norm, self.eps))
        q = rotate(rms_norm(q.view(heads), self.q_norm, self.eps), *rotary)
        k = rotate(rms_norm(k.view(heads), self.k_norm, self.eps), *rotary)
        return q, *cache.write(self.index, k, v.view(heads), span)

    def __call__(self, x_BTd: Tensor, rotary: tuple[Tensor, Tensor], span: Span, cache: KVCache) -> Tensor:
        q, keys, values = self.write_keys(x_BTd, rotary, span, cache)
        x_BTd = x_BTd + F.linear(attend(q, keys, values, span, scale=self.scale), self.out)
        return x_BTd + self.mlp(rms_norm(x_BTd, self.post_norm, self.eps))


class Qwen3(AdapterModel):
    """See `BlockModel`."""

    config_class = Qwen3Config
    embedding_name = "model.embed_tokens.weight"
    layer_class = _Layer

"""config.json of LLaDA2.0 to 2.2, and the tensors that their checkpoints hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from dlmrt.checkpoint.config import Fields
from dlmrt.models.base import BlockSpec, ModelConfig
from dlmrt.models.experts import expert_shapes
from dlmrt.models.layers import gated_mlp_shapes, residual_adapter_shapes

_CANVAS, _MASK = 32, 156895


@dataclass(frozen=True, slots=True, kw_only=True)
class LLaDA2Config(ModelConfig):
    """The keys of config.json that the engine honours.

    Published files name neither block nor mask token: `canvas_length` is then 32 and `mask_token_id` 156895. LLaDA2.2's
    control tokens have no default: without `delete_token_id` and `insert_token_id` there are none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_width: int
    rope_theta: float
    rms_norm_eps: float
    use_qk_norm: bool
    max_position_embeddings: int
    tie_word_embeddings: bool
    first_k_dense_replace: int
    moe_intermediate_size: int
    num_experts: int
    num_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    canvas_length: int
    mask_token_id: int
    residual_intermediate_size: int
    delete_token_id: int | None = None
    insert_token_id: int | None = None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        fields = Fields(raw)
        for key, only in (("hidden_act", "silu"), ("score_function", "sigmoid"), ("state_family", "masked")):
            fields.require(key, only)
        for key in ("use_qkv_bias", "use_bias", "use_sliding_window", "norm_head"):
            fields.require(key, False)
        rope = fields.section("rope_parameters") or fields.section("rope_scaling")
        rope.require("rope_type", "default")
        heads, width = fields.integer("num_attention_heads"), fields.integer("hidden_size")
        head_dim = fields.integer("head_dim", default=width // heads)
        factor = rope.number("partial_rotary_factor", default=fields.number("partial_rotary_factor", default=0.5))
        vocab_size, experts = fields.integer("vocab_size"), fields.integer("num_experts")
        groups = fields.divisor("n_group", experts, default=8)
        kept = fields.integer("topk_group", default=4, high=groups)
        return cls(
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=fields.integer("intermediate_size"),
            num_hidden_layers=fields.integer("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=fields.divisor("num_key_value_heads", heads, default=heads),
            head_dim=head_dim,
            rotary_width=int(head_dim * factor),
            rope_theta=rope.number("rope_theta", default=fields.number("rope_theta", default=10000.0)),
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
            use_qk_norm=fields.boolean("use_qk_norm", default=True),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
            first_k_dense_replace=fields.integer("first_k_dense_replace", default=0, low=0),
            moe_intermediate_size=fields.integer("moe_intermediate_size"),
            num_experts=experts,
            num_shared_experts=fields.integer("num_shared_experts", default=0, low=0),
            num_experts_per_tok=fields.integer("num_experts_per_tok", high=kept * (experts // groups)),
            n_group=groups,
            topk_group=kept,
            routed_scaling_factor=fields.number("routed_scaling_factor", default=1.0),
            canvas_length=fields.integer("block_size" if "block_size" in raw else "canvas_length", default=_CANVAS),
            mask_token_id=fields.integer("mask_token_id", default=_MASK, low=0, high=vocab_size - 1),
            residual_intermediate_size=fields.integer("residual_intermediate_size", default=0, low=0),
            **_control_tokens(fields, vocab_size),
        )

    @property
    def spec(self) -> BlockSpec:
        return BlockSpec(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            canvas_length=self.canvas_length,
            max_context=self.max_position_embeddings,
            family="masked",
            mask_token_id=self.mask_token_id,
            layout="aligned",
            commit="block_causal",
            has_residual=self.residual_intermediate_size > 0,
            kv_layers=((self.num_key_value_heads, self.head_dim),) * self.num_hidden_layers,
            delete_token_id=self.delete_token_id,
            insert_token_id=self.insert_token_id,
        )

    def decoder_defaults(self, generation: Mapping[str, Any]) -> Mapping[str, Any]:
        default = {"name": "threshold" if self.delete_token_id is None else "insert_delete"}
        return generation.get("decoder") or default

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        d, m, D = self.hidden_size, self.moe_intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * D, self.num_key_value_heads * D
        shapes: dict[str, tuple[int, ...]] = {"model.word_embeddings.weight": (self.vocab_size, d)}
        for index in range(self.num_hidden_layers):
            layer = f"model.layers.{index}."
            shapes |= {
                f"{layer}input_layernorm.weight": (d,),
                f"{layer}post_attention_layernorm.weight": (d,),
                f"{layer}attention.query_key_value.weight": (q + 2 * kv, d),
                f"{layer}attention.dense.weight": (d, q),
            }
            if self.use_qk_norm:
                shapes |= {f"{layer}attention.{name}_layernorm.weight": (D,) for name in ("query", "key")}
            if index < self.first_k_dense_replace:
                shapes |= gated_mlp_shapes(f"{layer}mlp.", d, self.intermediate_size)
                continue
            shapes |= expert_shapes(f"{layer}mlp.experts.", self.num_experts, d, m)
            shapes |= {
                f"{layer}mlp.gate.weight": (self.num_experts, d),
                f"{layer}mlp.gate.expert_bias": (self.num_experts,),
            }
            if self.num_shared_experts:
                shapes |= gated_mlp_shapes(f"{layer}mlp.shared_experts.", d, m * self.num_shared_experts)
        shapes["model.norm.weight"] = (d,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes | residual_adapter_shapes(d, self.residual_intermediate_size)

    def active_share(self, name: str) -> float:
        return self.num_experts_per_tok / self.num_experts if ".mlp.experts." in name else 1.0

    def ignores(self, name: str) -> bool:
        return self.tie_word_embeddings and name == "lm_head.weight"


def _control_tokens(fields: Fields, vocab_size: int) -> dict[str, int]:
    names = ("delete_token_id", "insert_token_id")
    if not any(fields.raw.get(name) is not None for name in names):
        return {}
    return {name: fields.integer(name, low=0, high=vocab_size - 1) for name in names}

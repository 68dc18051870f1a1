"""config.json of DiffusionGemma (the text model), and the tensors that its checkpoints hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from dlmrt.checkpoint.config import Fields
from dlmrt.errors import ModelConfigError
from dlmrt.models.base import BlockSpec, ModelConfig
from dlmrt.models.layers import gated_mlp_shapes

_FULL_EVERY = 6
_ROPE = {"sliding_attention": ("default", 1e4, 1.0), "full_attention": ("proportional", 1e6, 0.25)}
_SAMPLER = "EntropyBoundSamplerConfig"
_GENERATION_KEYS = {
    "max_steps": "max_denoising_steps",
    "t_min": "t_min",
    "t_max": "t_max",
    "stability_threshold": "stability_threshold",
    "confidence_threshold": "confidence_threshold",
}
# What DiffusionGemmaForBlockDiffusion.generate does where the file says nothing (transformers 5.24).
_GENERATION_DEFAULTS = {
    "max_steps": 48,
    "entropy_bound": 0.1,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """One layer's attention. window: width of a sliding layer, None for a full one, whose values are its keys."""

    window: int | None
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rope_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionGemmaConfig(ModelConfig):
    """The keys of config.json and of its `text_config` that the engine honours; the vision tower is not used."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: tuple[AttentionConfig, ...]
    num_experts: int
    top_k_experts: int
    moe_intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    final_logit_softcapping: float
    canvas_length: int

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        top = Fields(raw)
        top.require("tie_word_embeddings", True)
        fields = top.section("text_config")
        if not fields:
            raise ModelConfigError("config.json has no text_config, which must describe the text model")
        fields.require("hidden_activation", "gelu_pytorch_tanh")
        fields.require("attention_bias", False)
        fields.require("tie_word_embeddings", True)
        if fields.raw.get("use_bidirectional_attention") == "all":
            raise ModelConfigError(
                "config.json has text_config.use_bidirectional_attention = 'all'; only a causal context is supported"
            )
        experts = fields.integer("num_experts")
        return cls(
            vocab_size=fields.integer("vocab_size", default=262144),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            attention=_attention(fields),
            num_experts=experts,
            top_k_experts=fields.integer("top_k_experts", high=experts),
            moe_intermediate_size=fields.integer("moe_intermediate_size"),
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
            max_position_embeddings=fields.integer("max_position_embeddings", default=131072),
            final_logit_softcapping=fields.number("final_logit_softcapping", default=30.0),
            canvas_length=top.integer("canvas_length", default=256),
        )

    @property
    def spec(self) -> BlockSpec:
        return BlockSpec(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            canvas_length=self.canvas_length,
            max_context=self.max_position_embeddings,
            family="uniform",
            mask_token_id=None,
            layout="prompt_end",
            commit="causal",
            has_residual=True,
            kv_layers=tuple((layer.kv_heads, layer.head_dim) for layer in self.attention),
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        d, m, E = self.hidden_size, self.moe_intermediate_size, self.num_experts
        shapes: dict[str, tuple[int, ...]] = {"model.decoder.embed_tokens.weight": (self.vocab_size, d)}
        for index, attention in enumerate(self.attention):
            layer = f"model.decoder.layers.{index}."
            q, kv, D = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim, attention.head_dim
            shapes |= {f"{layer}{name}.weight": (d,) for name in LAYER_NORMS}
            shapes |= {
                f"{layer}self_attn.q_proj.weight": (q, d),
                f"{layer}self_attn.k_proj.weight": (kv, d),
                f"{layer}self_attn.o_proj.weight": (d, q),
                f"{layer}self_attn.q_norm.weight": (D,),
                f"{layer}self_attn.k_norm.weight": (D,),
                f"{layer}router.proj.weight": (E, d),
                f"{layer}router.scale": (d,),
                f"{layer}router.per_expert_scale": (E,),
                f"{layer}experts.gate_up_proj": (E, 2 * m, d),
                f"{layer}experts.down_proj": (E, d, m),
                f"{layer}layer_scalar": (1,),
                f"model.encoder.language_model.layers.{index}.layer_scalar": (1,),
            }
            if attention.window is not None:
                shapes[f"{layer}self_attn.v_proj.weight"] = (kv, d)
            shapes |= gated_mlp_shapes(f"{layer}mlp.", d, self.intermediate_size)
        shapes["model.decoder.norm.weight"] = (d,)
        shapes["model.decoder.self_conditioning.pre_norm.weight"] = (d,)
        return shapes | gated_mlp_shapes("model.decoder.self_conditioning.", d, self.intermediate_size)

    def active_share(self, name: str) -> float:
        return self.top_k_experts / self.num_experts if ".experts." in name else 1.0

    def ignores(self, name: str) -> bool:
        """The vision tower, and copies of tied weights."""
        return name == "lm_head.weight" or name.startswith("model.encoder.")

    def decoder_defaults(self, generation: Mapping[str, Any]) -> Mapping[str, Any]:
        """Reads transformers' layout: keys at the top of generation_config.json, the bound in `sampler_config`."""
        if generation.get("decoder"):
            return generation["decoder"]
        sampler = generation.get("sampler_config") or {}
        kind = sampler.get("_cls_name", _SAMPLER)
        if kind != _SAMPLER:
            raise ModelConfigError(f"generation_config.json has sampler_config._cls_name = {kind!r}; use {_SAMPLER!r}")
        given = {ours: generation.get(theirs) for ours, theirs in _GENERATION_KEYS.items()}
        given["entropy_bound"] = sampler.get("entropy_bound")
        set_values = {name: value for name, value in given.items() if value is not None}
        return {"name": "entropy_bound", "greedy": False, **_GENERATION_DEFAULTS, **set_values}


LAYER_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
    "post_feedforward_layernorm",
)


def _attention(fields: Fields) -> tuple[AttentionConfig, ...]:
    """Attention of every layer: `layer_types`, and what `per_layer_config` (or the global_* keys) changes of it."""
    count, heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
    kv_heads, head_dim = fields.divisor("num_key_value_heads", heads), fields.integer("head_dim", default=256)
    window = fields.integer("sliding_window", default=512)
    types = fields.raw.get("layer_types") or [
        "sliding_attention" if (i + 1) % _FULL_EVERY else "full_attention" for i in range(count)
    ]
    if len(types) != count or not set(types) <= set(_ROPE) or types[-1] != "full_attention":
        raise ModelConfigError(
            f"config.json has text_config.layer_types = {types!r}; it must list {count} of {sorted(_ROPE)}, the last "
            "one full_attention"
        )
    overrides = {int(key): Fields(value) for key, value in fields.section("per_layer_config").raw.items()}
    if not overrides:
        full = {
            "head_dim": fields.integer("global_head_dim", default=512),
            "num_key_value_heads": fields.integer("num_global_key_value_heads", default=kv_heads),
        }
        overrides = {i: Fields(full) for i, kind in enumerate(types) if kind == "full_attention"}
    layers = []
    for index, kind in enumerate(types):
        own = overrides.get(index, Fields({}))
        rope = fields.section("rope_parameters").section(kind)
        rope_type, theta, factor = _ROPE[kind]
        rope.require("rope_type", rope_type)
        rope.require("factor", 1.0)
        if kind == "sliding_attention":
            rope.require("partial_rotary_factor", 1.0)
        layers.append(
            AttentionConfig(
                window=window if kind == "sliding_attention" else None,
                heads=heads,
                kv_heads=own.divisor("num_key_value_heads", heads, default=kv_heads),
                head_dim=own.integer("head_dim", default=head_dim),
                rope_theta=rope.number("rope_theta", default=theta),
                rope_factor=rope.number("partial_rotary_factor", default=factor),
            )
        )
    return tuple(layers)

"""Trainable LLaDA2.x: a Hugging Face model with the tensor names and shapes of the published checkpoints.

Shape legend: B batch, T tokens, H heads, D head width, d width, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput

from orl_core.errors import ShapeError
from orl_core.noise import Family
from orl_core.residual import ResidualAdapter
from orl_train.attention import AttentionPlan, staircase_attention
from orl_train.models.llada2_config import LLaDA2MoeConfig
from orl_train.models.llada2_experts import LLaDA2MLP, LLaDA2Router, LLaDA2SparseMoe
from orl_train.models.packed import AdapterDenoiser


class LLaDA2RMSNorm(nn.Module):
    """weight * x / rms(x), normalised in float32 and cast back before the weight is applied."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x_float = x.float()
        return self.weight * (x_float * (x_float.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)


def rotary(positions_BT: Tensor, width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, width] of position * theta^(-2i / width), each frequency twice."""
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=positions_BT.device) / width
    angle = positions_BT[..., None].float() / theta**exponent
    angle = torch.cat((angle, angle), -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_BHTD: Tensor, cos_BTr: Tensor, sin_BTr: Tensor) -> Tensor:
    """Rotates the first r dimensions of each head in pairs (i, i + r/2)."""
    turned, kept = x_BHTD.split((cos_BTr.shape[-1], x_BHTD.shape[-1] - cos_BTr.shape[-1]), -1)
    first, second = turned.chunk(2, -1)
    turned = turned * cos_BTr[:, None] + torch.cat((-second, first), -1) * sin_BTr[:, None]
    return torch.cat((turned, kept), -1)


class LLaDA2Attention(nn.Module):
    """Grouped-query attention with one projection laid out [all q | all k | all v]; QK-norm comes before rotary."""

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__()
        assert config.head_dim is not None
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, rows, bias=config.use_qkv_bias)
        self.dense = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=config.use_bias)
        if config.use_qk_norm:
            self.query_layernorm = LLaDA2RMSNorm(self.head_dim, config.rms_norm_eps)
            self.key_layernorm = LLaDA2RMSNorm(self.head_dim, config.rms_norm_eps)
        self.use_qk_norm = config.use_qk_norm

    def forward(self, x_BTd: Tensor, cos: Tensor, sin: Tensor, mask: "Tensor | AttentionPlan") -> Tensor:
        qkv = self.query_key_value(x_BTd).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if self.use_qk_norm:
            q, k = self.query_layernorm(q), self.key_layernorm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if isinstance(mask, AttentionPlan):
            y_BHTD = staircase_attention(q, k, v, mask)
        else:
            y_BHTD = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.dense(y_BHTD.transpose(1, 2).flatten(-2))


class LLaDA2Layer(GradientCheckpointingLayer):
    """Pre-norm attention and feed-forward; the first `first_k_dense_replace` layers are dense."""

    def __init__(self, config: LLaDA2MoeConfig, index: int) -> None:
        super().__init__()
        self.attention = LLaDA2Attention(config)
        dense = index < config.first_k_dense_replace
        self.mlp = LLaDA2MLP(config, config.intermediate_size) if dense else LLaDA2SparseMoe(config)
        self.input_layernorm = LLaDA2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LLaDA2RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BTd: Tensor, cos: Tensor, sin: Tensor, mask: "Tensor | AttentionPlan") -> Tensor:
        x_BTd = x_BTd + self.attention(self.input_layernorm(x_BTd), cos, sin, mask)
        return x_BTd + self.mlp(self.post_attention_layernorm(x_BTd))


class LLaDA2MoePreTrainedModel(PreTrainedModel):
    """Initialisation shared by the two classes."""

    config_class = LLaDA2MoeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LLaDA2Layer"]  # noqa: RUF012 - declared so by transformers
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LLaDA2Router):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            init.zeros_(module.expert_bias)
        elif isinstance(module, LLaDA2RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, ResidualAdapter):
            init.zeros_(module.down_proj.weight)
            init.ones_(module.alpha)


class LLaDA2MoeModel(LLaDA2MoePreTrainedModel):
    """Embedding, layers, final norm."""

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LLaDA2Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LLaDA2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_width, self.rope_theta = config.rotary_width, config.rope_theta
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.word_embeddings = value

    def forward(
        self, inputs_embeds: Tensor, attention_mask: "Tensor | AttentionPlan", position_ids: Tensor
    ) -> BaseModelOutput:
        """inputs_embeds float [B, T, d]; attention_mask bool [B, 1, T, T] or a plan; position_ids int64 [B, T].

        `hidden_states` holds the input of the first layer and the output of each, before the final norm.
        """
        cos, sin = rotary(position_ids, self.rotary_width, self.rope_theta, inputs_embeds.dtype)
        hidden = [inputs_embeds]
        for layer in self.layers:
            hidden.append(layer(hidden[-1], cos, sin, attention_mask))
        return BaseModelOutput(last_hidden_state=self.norm(hidden[-1]), hidden_states=tuple(hidden))


class LLaDA2MoeModelLM(AdapterDenoiser, LLaDA2MoePreTrainedModel):
    """Body, LM head and, if configured, residual adapter. Logits predict the token at their own position."""

    _tied_weights_keys = {"lm_head.weight": "model.word_embeddings.weight"}  # noqa: RUF012 - declared so by transformers

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__(config)
        self.model = LLaDA2MoeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.residual_adapter = (
            ResidualAdapter(config.hidden_size, config.residual_intermediate_size, config.rms_norm_eps)
            if config.residual_intermediate_size
            else None
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.word_embeddings = value

    @property
    def family(self) -> Family:
        return "masked"

    @property
    def embedding(self) -> Tensor:
        """E [V, d], with which the residual context is computed."""
        weight = self.model.word_embeddings.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def context_blocks(self) -> int:
        """Blocks lie at multiples of this many tokens, and a clean token sees its whole block."""
        return self.config.canvas_length

    def _layer_mask(self, mask: "Tensor | AttentionPlan", batch: int, length: int) -> "Tensor | AttentionPlan":
        if isinstance(mask, AttentionPlan):
            return mask
        if mask.shape[-2:] != (length, length) or mask.dim() not in (2, 3, 4):
            raise ShapeError(
                f"attention_mask has shape {tuple(mask.shape)}; the block mask must be [T, T], [B, T, T] or "
                f"[B, 1, T, T] with T = {length} (orl_core.visibility makes one)"
            )
        return mask if mask.dim() == 4 else mask.expand(batch, length, length)[:, None]

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: "Tensor | AttentionPlan",
        z: Tensor | None = None,
        receives: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states float [B, T, d].

        ids, positions: int64 [B, T]; mask: bool [T, T], [B, T, T] or [B, 1, T, T], True where a query (row) may attend
        to a key, or an AttentionPlan; z: float [B, T, d] or None, ignored by a model without adapter; receives: bool
        [B, T]. Raises ShapeError for a mask of another shape: a padding mask does not say which tokens share a block.
        """
        embeds = self.with_residual(self.model.word_embeddings(ids), z, receives)
        hidden = self.model(embeds, self._layer_mask(mask, *ids.shape), positions).last_hidden_state
        assert hidden is not None
        return hidden

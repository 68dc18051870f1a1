"""QwenDLM: a Qwen3 body read as a block-diffusion model, with the residual adapter of ORL.

Shape legend: B batch, T packed tokens, V vocabulary, d width. Weight names: those of transformers' Qwen3ForCausalLM,
plus `residual_adapter.*` (orl_core.residual.ResidualAdapter).
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3Model

from orl_core.errors import ConfigError, ShapeError
from orl_core.noise import Family
from orl_core.residual import ResidualAdapter
from orl_train.models.packed import AdapterDenoiser


class QwenDLMConfig(Qwen3Config):
    """Qwen3's configuration and four fields of its own.

    canvas_length: tokens denoised together, > 0.
    state_family: "uniform" or "masked".
    mask_token_id: the id of [MASK]; needed by the masked family, None otherwise.
    residual_intermediate_size: width of the residual adapter's MLP; 0 for a model without one.
    """

    model_type = "qwen_dlm"
    canvas_length: int = 256
    state_family: str = "uniform"
    mask_token_id: int | None = None
    residual_intermediate_size: int = 0

    def check(self) -> None:
        """Raises ConfigError if the diffusion fields contradict each other."""
        if self.state_family not in ("uniform", "masked"):
            raise ConfigError(f"state_family is {self.state_family!r}; it must be 'uniform' or 'masked'")
        if self.canvas_length < 1:
            raise ConfigError(f"canvas_length is {self.canvas_length}; it must be at least 1")
        if self.state_family == "masked" and self.mask_token_id is None:
            raise ConfigError("state_family is 'masked' but mask_token_id is not set")


class QwenDLMForBlockDiffusion(AdapterDenoiser, PreTrainedModel):
    """The trainable model; implements orl_core.protocols.Denoiser."""

    config_class = QwenDLMConfig
    config: QwenDLMConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (transformers' own form)
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Qwen3DecoderLayer"]  # noqa: RUF012

    def __init__(self, config: QwenDLMConfig) -> None:
        super().__init__(config)
        config.check()
        self.model = Qwen3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.residual_intermediate_size > 0:
            self.residual_adapter = ResidualAdapter(
                config.hidden_size, config.residual_intermediate_size, config.rms_norm_eps
            )
        else:
            self.residual_adapter = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ResidualAdapter):
            nn.init.zeros_(module.down_proj.weight)
            nn.init.ones_(module.alpha)

    @property
    def family(self) -> Family:
        return cast(Family, self.config.state_family)

    @property
    def embedding(self) -> Tensor:
        """E [V, d], with which the residual context is computed."""
        return self.model.embed_tokens.weight

    @property
    def context_blocks(self) -> None:
        """The context is token-causal, and canvases are laid from the prompt's end."""
        return

    def hidden(
        self, ids: Tensor, positions: Tensor, mask: Any, z: Tensor | None = None, receives: Tensor | None = None
    ) -> Tensor:
        """Final hidden states float [B, T, d].

        ids, positions: int64 [B, T]; mask: bool [B, T, T], True = may attend, or an AttentionPlan (the model must then
        be loaded with attn_implementation="staircase"); z: float [B, T, d] residual context before the adapter, or
        None; receives: bool [B, T], the positions that take it.
        """
        embedded = self.with_residual(self.model.embed_tokens(ids), z, receives)
        if isinstance(mask, Tensor):
            mask = additive_mask(mask, embedded.dtype)
        masks = dict.fromkeys(self.config.layer_types or (), mask)
        return self.model(inputs_embeds=embedded, position_ids=positions, attention_mask=masks, use_cache=False)[0]


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, T, T] with 0 where the bool [B, T, T] mask is True and the least finite number elsewhere.

    Eager attention adds its mask to the scores, so a bool mask would silently hide nothing.
    """
    if mask.dtype != torch.bool:
        raise ShapeError(f"the attention mask is of dtype {mask.dtype}; it must be bool [B, T, T]")
    kind = mask.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    hidden = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
    return hidden[:, None]


def count_parameters(model: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """bool [1, T, T]: the visibility of a clean context."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None]

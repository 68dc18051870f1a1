"""Trainable DiffusionGemma: transformers' own model, called with packed tokens as the losses and rollouts need it.

Clean tokens go through the encoder, whose keys and values the decoder reads; state tokens go through the decoder, which
takes the residual context z through the model's self-conditioning module (g_phi of ORL; alpha is 1). Both share their
weights, except for one scalar a layer. Shape legend: B batch, T packed tokens, V vocabulary, d width.
"""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from orl_core.errors import ConfigError, ShapeError
from orl_core.noise import Family
from orl_core.visibility import Visibility
from orl_train.attention import AttentionPlan
from orl_train.models.packed import PackedDenoiser
from orl_train.models.qwen_dlm import additive_mask

_TEXT_FIELDS = ("vocab_size", "hidden_size", "max_position_embeddings", "pad_token_id", "eos_token_id")


class DiffusionGemmaConfig(transformers.DiffusionGemmaConfig):
    """The published configuration; the fields of its text model are read through it."""

    @property
    def state_family(self) -> Family:
        return "uniform"

    @property
    def mask_token_id(self) -> None:
        """The uniform family has no mask token."""
        return

    def __getattr__(self, name: str) -> Any:
        if name in _TEXT_FIELDS and self.text_config is not None:
            return getattr(self.text_config, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")


class DiffusionGemmaForBlockDiffusion(PackedDenoiser, transformers.DiffusionGemmaForBlockDiffusion):
    """The trainable model; implements orl_core.protocols.Denoiser and is saved as the published class.

    The vision tower is kept and not trained. Raises ConfigError for a context that is not token-causal.
    """

    config_class = DiffusionGemmaConfig
    config: DiffusionGemmaConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: DiffusionGemmaConfig) -> None:
        text: Any = config.text_config
        if text.use_bidirectional_attention == "all":
            raise ConfigError("use_bidirectional_attention is 'all'; only a token-causal context can be trained")
        super().__init__(config)
        self.text = text

    @property
    def family(self) -> Family:
        return "uniform"

    @property
    def embedding(self) -> Tensor:
        """E [V, d] with the model's embedding scale, with which the residual context is computed; made anew."""
        embed = self.model.decoder.embed_tokens
        return embed.weight * embed.embed_scale.to(embed.weight.dtype)

    @property
    def context_blocks(self) -> None:
        """The context is token-causal, and canvases are laid from the prompt's end."""
        return

    def attention_mask(self, visibility: Visibility) -> Visibility:
        """What `hidden` takes as its mask: which tokens are states, and what sliding layers see, is read from it."""
        return visibility

    def residual_signal(self, z: Tensor) -> Tensor:
        """What self-conditioning adds to the embedding, [.., d]."""
        part = self.model.decoder.self_conditioning
        h = part.pre_norm(z.detach())
        return part.down_proj(part.act_fn(part.gate_proj(h)) * part.up_proj(h))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [.., V] of hidden states [.., d], softcapped."""
        cap = self.final_logit_softcapping
        return torch.tanh(self.lm_head(hidden).float() / cap) * cap

    def share_layers(self) -> None:
        """Lets the encoder use the decoder's linear modules themselves, so that LoRA updates both alike."""
        encoder = self.model.encoder.language_model
        for theirs, ours in zip(encoder.layers, self.model.decoder.layers, strict=True):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(theirs.self_attn, name, getattr(ours.self_attn, name))
            theirs.mlp = ours.mlp

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: AttentionPlan | Visibility,
        z: Tensor | None = None,
        receives: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states float [B, T, d].

        ids, positions: int64 [B, T]; mask: the tokens' Visibility, or an AttentionPlan made from it; z: float [B, T, d]
        residual context with the embedding scale, or None; receives: bool [B, T]. Raises ShapeError for a batch whose
        rows have their states at different tokens.
        """
        visibility = mask.visibility if isinstance(mask, AttentionPlan) else mask
        noisy_BT = visibility.state.expand(ids.shape) != 0
        if not torch.equal(noisy_BT, noisy_BT[:1].expand_as(noisy_BT)):
            raise ShapeError("the rows of the batch have their states at different tokens; they must lie alike")
        canvas = noisy_BT[0].nonzero().squeeze(-1)
        clean = (~noisy_BT[0]).nonzero().squeeze(-1)
        masks = self._masks(visibility, len(ids))
        cache = DynamicCache()  # keeps every token, unlike one made for sliding layers: packs hold several contexts
        clean_BTd = self.model.encoder.language_model(
            input_ids=ids[:, clean],
            attention_mask={kind: seen[:, :, clean][..., clean] for kind, seen in masks.items()},
            position_ids=positions[:, clean],
            cache=cache,
        ).last_hidden_state
        if not len(canvas):
            return clean_BTd
        order = torch.cat([clean, canvas])
        masks = {kind: seen[:, :, canvas][..., order] for kind, seen in masks.items()}
        if z is not None and receives is not None:
            z = z[:, canvas].masked_fill(~receives[:, canvas, None], 0)
        canvas_BTd = self._decode(
            ids[:, canvas], positions[:, canvas], masks, z if receives is not None else None, cache
        )
        return torch.cat([clean_BTd, canvas_BTd], 1)[:, order.argsort()]

    def _decode(
        self, ids: Tensor, positions: Tensor, masks: dict[str, Tensor], z: Tensor | None, cache: DynamicCache
    ) -> Tensor:
        """The decoder's own forward, with the self-conditioning signal z itself instead of logits that make it."""
        decoder, kinds = self.model.decoder, self.text.layer_types
        x = decoder.embed_tokens(ids)
        x = decoder.self_conditioning(x, torch.zeros_like(x) if z is None else z.detach().to(x.dtype))
        rotary = {kind: decoder.rotary_emb(x, positions, kind) for kind in set(kinds)}
        for layer, kind in zip(decoder.layers, kinds, strict=True):
            x = layer(
                x,
                position_embeddings=rotary[kind],
                attention_mask=masks[kind],
                position_ids=positions,
                cache=cache,
            )
        return decoder.norm(x)

    def _masks(self, visibility: Visibility, batch: int) -> dict[str, Tensor]:
        """Additive masks [B, 1, T, T] of full and sliding layers.

        Sliding layers see the clean tokens with position > anchor - window; the anchor is a clean query's own position
        and a state's first position, so that a canvas sees the last window - 1 clean tokens and all of itself.
        """
        seen = visibility.dense_mask()
        anchor = visibility.limit - (visibility.state == 0).long()
        oldest = anchor - self.text.sliding_window
        near = (visibility.state != 0)[..., None, :] | (visibility.position[..., None, :] > oldest[..., :, None])
        size = (batch, *seen.shape[-2:])
        return {
            "full_attention": additive_mask(seen.expand(size), self.dtype),
            "sliding_attention": additive_mask((seen & near).expand(size), self.dtype),
        }

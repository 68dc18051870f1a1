"""What trainable models share: how packed tokens become logits, and where the residual adapter's output enters.

Shape legend: B batch, T packed tokens, N chosen tokens, V vocabulary, d width.
"""

from typing import Any

import torch
from torch import Tensor

from orl_core.residual import ResidualAdapter, add_residual
from orl_core.visibility import Visibility


class PackedDenoiser:
    """Mixin, before the transformers class: `denoise` and `forward` of a model that has `hidden` and `logits`."""

    def hidden(
        self, ids: Tensor, positions: Tensor, mask: Any, z: Tensor | None = None, receives: Tensor | None = None
    ) -> Tensor:
        """Final hidden states float [B, T, d]."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [.., V] of hidden states [.., d]."""
        raise NotImplementedError

    def denoise(
        self, ids: Tensor, positions: Tensor, mask: Any, z: Tensor | None = None, receives: Tensor | None = None
    ) -> Tensor:
        """Logits float [B, T, V] (orl_core.protocols.Denoiser); arguments as of the model's `hidden`."""
        return self.logits(self.hidden(ids, positions, mask, z, receives))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Any,
        z: Tensor | None = None,
        receives: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """`denoise` as wrappers (DDP, FSDP, LoRA) call it; with `rows`, int64 [N] indices into the B * T tokens, only
        their logits [N, V]."""
        hidden = self.hidden(input_ids, position_ids, attention_mask, z, receives)
        return self.logits(hidden if rows is None else hidden.flatten(0, 1)[rows])


class AdapterDenoiser(PackedDenoiser):
    """A PackedDenoiser whose residual pathway is `residual_adapter`, None for a model without one."""

    residual_adapter: ResidualAdapter | None
    lm_head: Any

    def attention_mask(self, visibility: Visibility) -> Tensor:
        """What `hidden` takes as its mask in a rollout: bool [.., T, T]."""
        return visibility.dense_mask()

    def residual_signal(self, z: Tensor) -> Tensor | None:
        """alpha * g_phi(z), [.., d]; None for a model without adapter."""
        return None if self.residual_adapter is None else self.residual_adapter(z)

    def with_residual(self, embedded: Tensor, z: Tensor | None, receives: Tensor | None) -> Tensor:
        """Token embeddings [B, T, d] and, at the positions that receive it, the adapter's output for z."""
        if z is None or receives is None or self.residual_adapter is None:
            return embedded
        return add_residual(embedded, self.residual_adapter(z), receives)

    def logits(self, hidden: Tensor) -> Tensor:
        """In the precision of the head's weights, also under autocast: bfloat16 steps by 1/16 between 8 and 16."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.lm_head(hidden.to(self.lm_head.weight.dtype))

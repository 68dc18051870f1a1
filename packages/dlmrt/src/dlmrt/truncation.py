"""Top-k and top-p: which tokens a position may sample.

The set is described by its lowest logit, so that it does not depend on the order in which the vocabulary is read;
tokens that tie with the last one kept are kept as well. Shape legend: B rows, C canvas, K largest logits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Truncation:
    """Sampling from the `top_k` most probable tokens, and of these from the fewest whose renormalised probabilities add
    up to `top_p` (Holtzman et al., arXiv 1904.09751); in this order, after the temperature, as transformers does.

    None leaves a rule out.
    """

    top_k: int | None = None
    top_p: float | None = None

    def merge(self, largest_BCK: Tensor | None, logits_BCW: Tensor) -> Tensor:
        """The logits that `floor` needs of the tokens seen so far: the top_k largest, or all without a top_k."""
        if largest_BCK is not None:
            logits_BCW = torch.cat([largest_BCK, logits_BCW], -1)
        if self.top_k is None:
            return logits_BCW
        return logits_BCW.topk(min(self.top_k, logits_BCW.shape[-1]), -1).values

    def floor(self, largest_BCK: Tensor) -> Tensor:
        """float32 [B, C]: a token may be sampled if its logit is not below this."""
        descending_BCK = largest_BCK.sort(-1, descending=True).values
        if self.top_p is None:
            return descending_BCK[..., -1]
        p_BCK = descending_BCK.softmax(-1)
        needed_BCK = p_BCK.cumsum(-1) - p_BCK < self.top_p
        last_BC = (needed_BCK.sum(-1, keepdim=True) - 1).clamp(min=0)
        return descending_BCK.gather(-1, last_BC).squeeze(-1)

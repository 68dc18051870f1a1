"""Noise of the two state families, seeded per sample, and the block-diffusion training losses.

masked:  a token is replaced by [MASK] with probability t.
uniform: a token is replaced by a uniformly random token with probability t (it may draw itself).
Shape legend: T tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from orl_core.errors import ConfigError

Family = Literal["masked", "uniform"]


@dataclass(frozen=True, slots=True)
class NoisyTokens:
    """tokens int64 [T]; corrupted bool [T]: positions that were replaced; level float32 [T]: the t of each position."""

    tokens: Tensor
    corrupted: Tensor
    level: Tensor


def sample_levels(blocks: int, generator: torch.Generator, low: float = 0.05, high: float = 1.0) -> Tensor:
    """Noise levels t ~ U(low, high), stratified over the blocks of one sample (low discrepancy), float32 [blocks].

    Level k lies in its own 1/blocks part of the range; the parts are shuffled over the blocks.
    """
    strata = (torch.randperm(blocks, generator=generator) + torch.rand(blocks, generator=generator)) / blocks
    return low + (high - low) * strata


def corrupt(
    clean: Tensor,
    level: Tensor,
    family: Family,
    generator: torch.Generator,
    *,
    vocab_size: int,
    mask_id: int | None = None,
) -> NoisyTokens:
    """Replaces each token with probability `level` (float [T]) by the family's noise.

    clean: int64 [T], on the generator's device. Raises ConfigError without `mask_id` in the masked family.
    """
    hit = torch.rand(clean.shape, generator=generator) < level
    if family == "masked":
        if mask_id is None:
            raise ConfigError("mask_id is None; the masked family replaces tokens by it, so it must be a token id")
        noise = torch.full_like(clean, mask_id)
    else:
        noise = torch.randint(vocab_size, clean.shape, generator=generator, dtype=clean.dtype)
    return NoisyTokens(torch.where(hit, noise, clean), hit, level)


def diffusion_loss(logits_TV: Tensor, target_T: Tensor, weight_T: Tensor) -> Tensor:
    """Weighted cross-entropy sum_i w_i CE_i in float32 (a sum: the caller divides by the number of samples).

    With the weights of `loss_weights` this is, for the masked family, the simplified objective of MDLM
    (arXiv 2406.07524) without the 1/t factor.
    """
    ce_T = torch.nn.functional.cross_entropy(logits_TV.float(), target_T, reduction="none")
    return (ce_T * weight_T).sum()


def loss_weights(corrupted: Tensor, family: Family, clean_weight: float = 1.0) -> Tensor:
    """Per-position loss weights that sum to 1 (or are all zero), float32 [T].

    masked: only masked positions count. uniform: every position counts, since the model must also recognise which
    tokens are right; uncorrupted ones with `clean_weight`.
    """
    weight = corrupted.float()
    if family == "uniform":
        weight = torch.where(corrupted, weight, torch.full_like(weight, clean_weight))
    total = weight.sum()
    return weight / torch.where(total > 0, total, torch.ones_like(total))

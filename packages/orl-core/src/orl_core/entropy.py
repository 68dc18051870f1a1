"""Entropy and confidence of predictive distributions.

Shape legend: B batch, C canvas positions, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenStats:
    """What a decoder sees of one denoising step; all tensors are [B, C].

    argmax       int64    most probable token
    candidate    int64    sampled token; equals `argmax` in greedy decoding
    candidate_prob float32 probability of `candidate`
    top_prob     float32  probability of `argmax`
    entropy      float32  entropy of the distribution, in nats
    """

    argmax: Tensor
    candidate: Tensor
    candidate_prob: Tensor
    top_prob: Tensor
    entropy: Tensor


def entropy(logits: Tensor, dim: int = -1) -> Tensor:
    """Shannon entropy in nats of softmax(logits) along `dim`.

    H = logsumexp(x) - sum_v p_v x_v, with 0 * inf = 0, so that logits of -inf (suppressed tokens) are allowed.
    Returns the shape of `logits` without `dim`, in the dtype of `logits`.
    """
    log_p = torch.log_softmax(logits, dim)
    p = log_p.exp()
    return -(p * torch.where(p > 0, log_p, torch.zeros_like(log_p))).sum(dim)


def token_stats(logits_BCV: Tensor, candidate_BC: Tensor | None = None) -> TokenStats:
    """Statistics of softmax(logits) at every canvas position, in float32.

    logits_BCV: already temperature-scaled, soft-capped and suppressed logits.
    candidate_BC: int64 sampled tokens, or None for greedy decoding (candidate = argmax).
    """
    log_p_BCV = torch.log_softmax(logits_BCV.float(), -1)
    p_BCV = log_p_BCV.exp()
    top_prob_BC, argmax_BC = p_BCV.max(-1)
    entropy_BC = -(p_BCV * torch.where(p_BCV > 0, log_p_BCV, torch.zeros_like(log_p_BCV))).sum(-1)
    if candidate_BC is None:
        return TokenStats(argmax_BC, argmax_BC, top_prob_BC, top_prob_BC, entropy_BC)
    candidate_prob_BC = p_BCV.gather(-1, candidate_BC[..., None]).squeeze(-1)
    return TokenStats(argmax_BC, candidate_BC, candidate_prob_BC, top_prob_BC, entropy_BC)


def sample_gumbel(logits_BCV: Tensor, uniform_BCV: Tensor) -> Tensor:
    """One sample per position from softmax(logits) by the Gumbel-max trick.

    uniform_BCV: uniform draws in (0, 1), float32. Returns int64 [B, C]: argmax_v (x_v - log(-log u_v)).
    """
    return (logits_BCV.float() - torch.log(-torch.log(uniform_BCV))).argmax(-1)

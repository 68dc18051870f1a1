"""The losses of an on-policy residual learning update, response-normalised.

Every term is averaged over its own positions of a state, then over the states of a response, then over responses. The
weights of states and the number of responses belong to the whole update, so the losses of the packs, micro-batches
and ranks into which it is divided simply add up (and so do their gradients).

Shape legend: N rows (canvas tokens of every replayed state), V vocabulary, S states, P adjacent pairs of states.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from orl_core.errors import ConfigError, ShapeError, require_at_least, require_range

MIN_LOG_PROB = -1e4  # stands in for log 0, so that 0 * log 0 is 0 and never NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class OrlLossConfig:
    """Total = prediction + kl_weight * kl + aec_weight * aec. Entropies are fractions of the maximum, log V.

    gate_entropy    an unresolved position is uncertain, hence trained, if its rollout entropy is at least this (0: all)
    kl_cap          upper bound of the reverse KL of one position, in nats
    reference_gate  the reference is confident where its entropy is at most this (1: everywhere)
    kl_positions    "canvas": every confident position is anchored; "unresolved": only unresolved ones
    rho             the next state's entropy shall be at most (1 - rho) times its source's
    """

    gate_entropy: float = 0.003
    kl_weight: float = 0.2
    kl_cap: float = 1.0
    reference_gate: float = 0.03
    kl_positions: Literal["canvas", "unresolved"] = "canvas"
    aec_weight: float = 10.0
    rho: float = 0.25

    def __post_init__(self) -> None:
        for name in ("gate_entropy", "reference_gate", "rho"):
            require_range(name, getattr(self, name), 0.0, 1.0)
        for name in ("kl_weight", "kl_cap", "aec_weight"):
            require_at_least(name, getattr(self, name), 0.0)
        if self.kl_positions not in ("canvas", "unresolved"):
            raise ConfigError(f"kl_positions is {self.kl_positions!r}; it must be 'canvas' or 'unresolved'")


@dataclass(frozen=True, slots=True)
class ReplayTargets:
    """What the rows of replayed states are trained towards.

    target          int64 [N]    verified final token of the row's position
    unresolved      bool [N]     whether the row was unresolved in its state
    rollout_entropy float32 [N]  entropy (nats) the rollout saw there
    state           int64 [N]    the row's state, 0..S-1
    state_weight    float32 [S]  1 / number of selected states of the state's response, wherever they are replayed
    pair            int64 [P, 2] adjacent states (source, next)
    pair_weight     float32 [P]  1 / number of pairs of the pair's response
    """

    target: Tensor
    unresolved: Tensor
    rollout_entropy: Tensor
    state: Tensor
    state_weight: Tensor
    pair: Tensor
    pair_weight: Tensor

    def to(self, device: torch.device) -> "ReplayTargets":
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self)})


@dataclass(frozen=True, slots=True)
class OrlLosses:
    """Scalars that add up over the parts of an update.

    state_entropy [S]: mean entropy / log V of each state's unresolved positions, detached; zero where there are none.
    uncertain, anchored: number of positions in the prediction loss and in the KL, int64 [].
    """

    total: Tensor
    prediction: Tensor
    kl: Tensor
    aec: Tensor
    state_entropy: Tensor
    uncertain: Tensor
    anchored: Tensor


def adjacent_entropy_contraction(next_entropy: Tensor, source_entropy: Tensor, rho: float) -> Tensor:
    """AEC of pairs of adjacent states (ORL): max(0, H_next - (1 - rho) * sg(H_source))^2, elementwise.

    The entropies are means over each state's own unresolved positions of entropy / log V. The source gets no gradient.
    """
    return (next_entropy - (1 - rho) * source_entropy.detach()).clamp(min=0).square()


def capped_reverse_kl(log_p_NV: Tensor, log_reference_NV: Tensor, cap: float) -> Tensor:
    """min(KL(p || p_ref), cap) of each row, [N]; no gradient where the cap holds. Both inputs are log-probabilities."""
    log_ratio_NV = log_p_NV.clamp(min=MIN_LOG_PROB) - log_reference_NV.detach().clamp(min=MIN_LOG_PROB)
    return (log_p_NV.exp() * log_ratio_NV).sum(-1).clamp(max=cap)


def state_mean(value_N: Tensor, counts_N: Tensor, state_N: Tensor, states: int) -> Tensor:
    """Mean of `value_N` over each state's rows where `counts_N` (bool) holds, [S]; zero for a state without any."""
    kept_N = torch.where(counts_N, value_N, torch.zeros_like(value_N))
    total_S = value_N.new_zeros(states).index_add(0, state_N, kept_N)
    count_S = value_N.new_zeros(states).index_add(0, state_N, counts_N.to(value_N.dtype))
    return total_S / count_S.clamp(min=1)


def orl_losses(
    logits_NV: Tensor,
    targets: ReplayTargets,
    config: OrlLossConfig,
    *,
    responses: int,
    reference_logits_NV: Tensor | None = None,
) -> OrlLosses:
    """The part of an update's losses that these rows carry.

    logits_NV: the trained model's logits, temperature-scaled as in the rollout; computed in at least float32.
    responses: number of responses in the whole update, over all micro-batches and ranks.
    reference_logits_NV: the frozen start model on the same states; needed unless config.kl_weight is 0.
    Raises ShapeError for rows that do not match `targets`, ConfigError for a missing reference or responses < 1.
    """
    _check(logits_NV, targets, config, responses, reference_logits_NV)
    dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    log_vocab = math.log(logits_NV.shape[-1])
    states = len(targets.state_weight)
    log_p_NV = torch.log_softmax(logits_NV.to(dtype), -1)
    entropy_N = _entropy(log_p_NV) / log_vocab
    weight_S = targets.state_weight.to(dtype) / responses

    uncertain_N = targets.unresolved & (targets.rollout_entropy >= config.gate_entropy * log_vocab)
    cross_entropy_N = -log_p_NV.gather(-1, targets.target[:, None]).squeeze(-1)
    prediction = (weight_S * state_mean(cross_entropy_N, uncertain_N, targets.state, states)).sum()

    kl, anchored_N = prediction.new_zeros(()), torch.zeros_like(targets.unresolved)
    if reference_logits_NV is not None:
        log_reference_NV = torch.log_softmax(reference_logits_NV.detach().to(dtype), -1)
        anchored_N = _entropy(log_reference_NV) <= config.reference_gate * log_vocab
        if config.kl_positions == "unresolved":
            anchored_N = anchored_N & targets.unresolved
        kl_N = capped_reverse_kl(log_p_NV, log_reference_NV, config.kl_cap)
        kl = (weight_S * state_mean(kl_N, anchored_N, targets.state, states)).sum()

    entropy_S = state_mean(entropy_N, targets.unresolved, targets.state, states)
    open_S = state_mean(torch.ones_like(entropy_N), targets.unresolved, targets.state, states) > 0
    source, following = targets.pair.unbind(-1)
    aec_P = adjacent_entropy_contraction(entropy_S[following], entropy_S[source], config.rho)
    aec_P = torch.where(open_S[source] & open_S[following], aec_P, torch.zeros_like(aec_P))
    aec = (targets.pair_weight.to(dtype) / responses * aec_P).sum()

    return OrlLosses(
        total=prediction + config.kl_weight * kl + config.aec_weight * aec,
        prediction=prediction,
        kl=kl,
        aec=aec,
        state_entropy=entropy_S.detach(),
        uncertain=uncertain_N.sum(),
        anchored=anchored_N.sum(),
    )


def _entropy(log_p_NV: Tensor) -> Tensor:
    """Entropy in nats of rows of log-probabilities, which may be -inf."""
    return -(log_p_NV.exp() * log_p_NV.clamp(min=MIN_LOG_PROB)).sum(-1)


def _check(
    logits_NV: Tensor, targets: ReplayTargets, config: OrlLossConfig, responses: int, reference_NV: Tensor | None
):
    if logits_NV.dim() != 2 or logits_NV.shape[0] != len(targets.target):
        raise ShapeError(f"logits have shape {tuple(logits_NV.shape)}; the targets need [{len(targets.target)}, V]")
    if reference_NV is None and config.kl_weight > 0:
        raise ConfigError("kl_weight > 0 needs reference_logits_NV; pass them, or set kl_weight to 0")
    if reference_NV is not None and reference_NV.shape != logits_NV.shape:
        raise ShapeError(f"reference logits have shape {tuple(reference_NV.shape)}, logits {tuple(logits_NV.shape)}")
    require_at_least("responses", responses, 1)

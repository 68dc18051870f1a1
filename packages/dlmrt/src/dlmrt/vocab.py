"""One pass over the vocabulary: everything a denoising step needs of the logits, without ever holding them all.

The vocabulary is read in chunks. Each leaves, per canvas position with logits x, its maximum m, s = sum exp(x - m),
t = sum exp(x - m) (x - m), best tokens and its share of z; two such parts merge into the part of both chunks (rescaled
by exp(m - m'), as in online softmax). At the end p_best = 1 / s, H = log s - t / s and z = (sum exp(x - m) E) / s.
This is the reference of the fused GPU kernel and the path on a CPU. Shape legend: B rows, C canvas, V vocabulary,
W tokens of a chunk, d width, K candidates of a top-k z.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from orl_core.entropy import TokenStats, sample_gumbel
from orl_core.rng import CounterRng, Stream, philox

CHUNK = 32768
# Finite, so that 0 * x stays 0 in sum exp(x - m) (x - m); its probability underflows to exactly 0.
_SUPPRESSED = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPass:
    """How logits become statistics: logits = softcap(hidden @ head^T) / temperature, without the suppressed tokens.

    head, embedding  [V, d]; z = softmax(logits) @ embedding * embedding_scale, in the dtype of `embedding`
    suppressed       token ids that are never predicted
    z_top_k          None computes z exactly; a number takes only that many of the most probable tokens, unnormalised
    chunk            tokens of the vocabulary read at a time
    """

    head: Tensor
    embedding: Tensor
    embedding_scale: float = 1.0
    softcap: float | None = None
    suppressed: tuple[int, ...] = ()
    z_top_k: int | None = None
    chunk: int = CHUNK

    def __call__(
        self, hidden_BCd: Tensor, temperature_B: Tensor, draw: "Draw | None", *, with_z: bool
    ) -> "VocabularyStats":
        """draw: where candidates are sampled from; None makes the most probable token the candidate (greedy)."""
        part: _Part | None = None
        for first in range(0, self.head.shape[0], self.chunk):
            new = self._part(hidden_BCd, temperature_B, draw, first, with_z)
            part = new if part is None else _merge(part, new)
        assert part is not None
        return self._finish(part, with_z)

    def _part(
        self, hidden_BCd: Tensor, temperature_B: Tensor, draw: "Draw | None", first: int, with_z: bool
    ) -> "_Part":
        last = min(first + self.chunk, self.head.shape[0])
        x_BCW = F.linear(hidden_BCd, self.head[first:last]).float()
        if self.softcap is not None:
            x_BCW = torch.tanh(x_BCW / self.softcap) * self.softcap
        x_BCW = x_BCW / temperature_B[:, None, None]
        for token in self.suppressed:
            if first <= token < last:
                x_BCW[..., token - first] = _SUPPRESSED
        best_BC, argmax_BC = x_BCW.max(-1)
        shifted_BCW = x_BCW - best_BC[..., None]
        exp_BCW = shifted_BCW.exp()
        part = _Part(best_BC, exp_BCW.sum(-1), (exp_BCW * shifted_BCW).sum(-1), argmax_BC + first)
        if draw is not None:
            uniform_BCW = draw.uniform(hidden_BCd.shape[1], first, last)
            local_BC = sample_gumbel(x_BCW, uniform_BCW)[..., None]
            part.sampled = local_BC.squeeze(-1) + first
            part.sampled_logit = x_BCW.gather(-1, local_BC).squeeze(-1)
            noise_BC = -torch.log(-torch.log(uniform_BCW.gather(-1, local_BC).squeeze(-1)))
            part.perturbed = part.sampled_logit + noise_BC
        if with_z and self.z_top_k is None:
            part.z = (exp_BCW.to(self.embedding.dtype) @ self.embedding[first:last]).float()
        elif with_z and self.z_top_k is not None:
            part.top, index_BCK = x_BCW.topk(min(self.z_top_k, last - first), -1)
            part.top_index = index_BCK + first
        return part

    def _finish(self, part: "_Part", with_z: bool) -> "VocabularyStats":
        top_prob_BC = 1 / part.sum
        entropy_BC = (part.sum.log() - part.weighted / part.sum).clamp(min=0)
        if part.sampled is not None and part.sampled_logit is not None:
            candidate_prob_BC = (part.sampled_logit - part.best).exp() / part.sum
            stats = TokenStats(part.argmax, part.sampled, candidate_prob_BC, top_prob_BC, entropy_BC)
        else:
            stats = TokenStats(part.argmax, part.argmax, top_prob_BC, top_prob_BC, entropy_BC)
        if not with_z:
            return VocabularyStats(stats, None, None)
        if part.z is not None:
            return VocabularyStats(stats, self._scaled(part.z / part.sum[..., None]), None)
        assert part.top is not None
        assert part.top_index is not None
        top_BCK, order_BCK = part.top.topk(min(self.z_top_k or 0, part.top.shape[-1]), -1)
        prob_BCK = (top_BCK - part.best[..., None]).exp() / part.sum[..., None]
        rows_BCKd = F.embedding(part.top_index.gather(-1, order_BCK), self.embedding).float()
        z_BCd = (prob_BCK[..., None, :] @ rows_BCKd).squeeze(-2)
        return VocabularyStats(stats, self._scaled(z_BCd), (1 - prob_BCK.sum(-1)).clamp(min=0))

    def _scaled(self, z_BCd: Tensor) -> Tensor:
        if self.embedding_scale != 1.0:
            z_BCd = z_BCd * self.embedding_scale
        return z_BCd.to(self.embedding.dtype)


@dataclass(frozen=True, slots=True)
class VocabularyStats:
    """tokens: statistics of each position; z [B, C, d] or None; missed: float32 [B, C] probability mass that a top-k z
    left out, None for an exact z."""

    tokens: TokenStats
    z: Tensor | None
    missed: Tensor | None


@dataclass(frozen=True, slots=True)
class Draw:
    """Uniform draws of one step for sampling candidates; lane v of a position belongs to token v. int64 [B] each."""

    seed: Tensor
    block: Tensor
    step: Tensor

    def uniform(self, length: int, first: int, last: int) -> Tensor:
        """float32 [B, length, last - first]: lanes first..last of `CounterRng.uniform`, without drawing the others."""
        if first == 0:
            rng = CounterRng(self.seed)
            return rng.uniform(Stream.CANDIDATE, self.block, self.step, length, last)
        return _uniform_lanes(self, length, first, last)


def _uniform_lanes(draw: Draw, length: int, first: int, last: int) -> Tensor:
    """The layout of `CounterRng`: counter (lane, position, step, 4 block + stream), four lanes a counter, 23 bits."""
    device, row, low = draw.seed.device, (-1, 1, 1), 0xFFFFFFFF
    lane = torch.arange(first // 4, -(-last // 4), device=device)
    position = torch.arange(length, device=device)[:, None]
    block = ((draw.block * 4 + int(Stream.CANDIDATE)) & low).view(row)
    key_low, key_high = (draw.seed & low).view(row), ((draw.seed >> 32) & low).view(row)
    words = torch.stack(philox(lane, position, draw.step.view(row), block, key_low, key_high), -1)
    skip = first % 4
    bits = words.flatten(-2)[..., skip : skip + last - first] >> 9
    return (bits.float() + 0.5) * 2.0**-23


@dataclass(slots=True)
class _Part:
    """What some chunks of the vocabulary leave; see the module's docstring."""

    best: Tensor
    sum: Tensor
    weighted: Tensor
    argmax: Tensor
    sampled: Tensor | None = None
    sampled_logit: Tensor | None = None
    perturbed: Tensor | None = None
    z: Tensor | None = None
    top: Tensor | None = None
    top_index: Tensor | None = None


def _merge(a: _Part, b: _Part) -> _Part:
    """The part of a's chunks followed by b's. Ties go to a, whose tokens have the lower ids."""
    best = torch.maximum(a.best, b.best)
    shift_a, shift_b = a.best - best, b.best - best
    scale_a, scale_b = shift_a.exp(), shift_b.exp()
    merged = _Part(
        best=best,
        sum=a.sum * scale_a + b.sum * scale_b,
        weighted=(a.weighted + a.sum * shift_a) * scale_a + (b.weighted + b.sum * shift_b) * scale_b,
        argmax=torch.where(b.best > a.best, b.argmax, a.argmax),
    )
    if a.perturbed is not None and b.perturbed is not None:
        take_b = b.perturbed > a.perturbed
        merged.perturbed = torch.maximum(a.perturbed, b.perturbed)
        merged.sampled = torch.where(take_b, _some(b.sampled), _some(a.sampled))
        merged.sampled_logit = torch.where(take_b, _some(b.sampled_logit), _some(a.sampled_logit))
    if a.z is not None and b.z is not None:
        merged.z = a.z * scale_a[..., None] + b.z * scale_b[..., None]
    if a.top is not None and b.top is not None:
        top, order = torch.cat([a.top, b.top], -1).topk(a.top.shape[-1], -1)
        merged.top = top
        merged.top_index = torch.cat([_some(a.top_index), _some(b.top_index)], -1).gather(-1, order)
    return merged


def _some(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor

"""One pass over the vocabulary: everything a denoising step needs of the logits, without ever holding them all.

The vocabulary is read in chunks. Each leaves, per canvas position with logits x, its maximum m, s = sum exp(x - m),
t = sum exp(x - m) (x - m), best tokens and its share of z; two such parts merge into the part of both chunks (rescaled
by exp(m - m'), as in online softmax). At the end p_best = 1 / s, H = log s - t / s and z = (sum exp(x - m) E) / s.
Top-k and top-p sampling reads the vocabulary a second time, once it is known which tokens may be sampled; top-p alone
holds all logits in between, to sort them. They change the candidate only: every statistic, the candidate's probability
included, is one of the whole distribution, so that a threshold means the same with and without them.
This is the reference of the fused GPU kernel and the path on a CPU. Shape legend: B rows, C canvas, V vocabulary,
W tokens of a chunk, d width, K candidates of a top-k z.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from dlmrt.loop.draws import Draw
from dlmrt.truncation import Truncation
from orl_core.entropy import TokenStats, sample_gumbel

CHUNK = 32768
# Finite, so that 0 * x stays 0 in sum exp(x - m) (x - m); its probability underflows to exactly 0.
_SUPPRESSED = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPass:
    """How logits become statistics: logits = softcap(hidden @ head^T) / temperature, without the suppressed tokens.

    head, embedding  [V, d]; z = softmax(logits) @ embedding * embedding_scale, in the dtype of `embedding`
    suppressed       token ids that are never predicted
    control          token ids that are predicted only where the caller allows it
    truncation       which tokens may be sampled; None: all
    z_top_k          None computes z exactly; a number takes only that many of the most probable tokens, unnormalised
    chunk            tokens of the vocabulary read at a time
    """

    head: Tensor
    embedding: Tensor
    embedding_scale: float = 1.0
    softcap: float | None = None
    suppressed: tuple[int, ...] = ()
    control: tuple[int, ...] = ()
    truncation: Truncation | None = None
    z_top_k: int | None = None
    chunk: int = CHUNK

    def __call__(
        self,
        hidden_BCd: Tensor,
        temperature_B: Tensor,
        draw: Draw | None,
        *,
        with_z: bool,
        control_BC: Tensor | None = None,
    ) -> "VocabularyStats":
        """draw: where candidates are sampled from; None makes the most probable token the candidate (greedy).
        control_BC: bool, where the control tokens may be predicted; None: nowhere."""
        read = partial(self._logits, hidden_BCd, temperature_B, control_BC)
        truncation = self.truncation if draw is not None else None
        part: _Part | None = None
        largest_BCK: Tensor | None = None
        for first in range(0, self.head.shape[0], self.chunk):
            x_BCW = read(first)
            new = self._part(x_BCW, draw if truncation is None else None, first, with_z)
            part = new if part is None else _merge(part, new)
            if truncation is not None:
                largest_BCK = truncation.merge(largest_BCK, x_BCW)
        assert part is not None
        if truncation is not None and draw is not None:
            assert largest_BCK is not None
            part.sample = self._truncated_sample(read, draw, truncation.floor(largest_BCK)[..., None])
        return self._finish(part, with_z)

    def _logits(self, hidden_BCd: Tensor, temperature_B: Tensor, control_BC: Tensor | None, first: int) -> Tensor:
        """Processed logits, float32 [B, C, W], of the chunk that begins at token `first`."""
        x_BCW = F.linear(hidden_BCd, self.head[first : first + self.chunk]).float()
        last = first + x_BCW.shape[-1]
        if self.softcap is not None:
            x_BCW = torch.tanh(x_BCW / self.softcap) * self.softcap
        x_BCW = x_BCW / temperature_B[:, None, None]
        for token in (*self.suppressed, *self.control):
            if first <= token < last:
                own_BC = x_BCW[..., token - first]
                if control_BC is not None and token in self.control:
                    own_BC.masked_fill_(~control_BC, _SUPPRESSED)
                else:
                    own_BC.fill_(_SUPPRESSED)
        return x_BCW

    def _truncated_sample(self, read: Callable[[int], Tensor], draw: Draw, floor_BC1: Tensor) -> "_Sample":
        sample: _Sample | None = None
        for first in range(0, self.head.shape[0], self.chunk):
            x_BCW = read(first)
            new = _sample(torch.where(x_BCW < floor_BC1, _SUPPRESSED, x_BCW), draw, first)
            sample = new if sample is None else _better(sample, new)
        assert sample is not None
        return sample

    def _part(self, x_BCW: Tensor, draw: Draw | None, first: int, with_z: bool) -> "_Part":
        last = first + x_BCW.shape[-1]
        best_BC, argmax_BC = x_BCW.max(-1)
        shifted_BCW = x_BCW - best_BC[..., None]
        exp_BCW = shifted_BCW.exp()
        part = _Part(best_BC, exp_BCW.sum(-1), (exp_BCW * shifted_BCW).sum(-1), argmax_BC + first)
        if draw is not None:
            part.sample = _sample(x_BCW, draw, first)
        if with_z and self.z_top_k is None:
            part.z = (exp_BCW.to(self.embedding.dtype) @ self.embedding[first:last]).float()
        elif with_z and self.z_top_k is not None:
            part.top, index_BCK = x_BCW.topk(min(self.z_top_k, last - first), -1)
            part.top_index = index_BCK + first
        return part

    def _finish(self, part: "_Part", with_z: bool) -> "VocabularyStats":
        top_prob_BC = 1 / part.sum
        entropy_BC = (part.sum.log() - part.weighted / part.sum).clamp(min=0)
        if part.sample is not None:
            candidate_prob_BC = (part.sample.logit - part.best).exp() / part.sum
            stats = TokenStats(part.argmax, part.sample.token, candidate_prob_BC, top_prob_BC, entropy_BC)
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


@dataclass(slots=True)
class _Part:
    """What some chunks of the vocabulary leave; see the module's docstring."""

    best: Tensor
    sum: Tensor
    weighted: Tensor
    argmax: Tensor
    sample: "_Sample | None" = None
    z: Tensor | None = None
    top: Tensor | None = None
    top_index: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Sample:
    """The token of the largest perturbed logit among some chunks, its logit, and that perturbed logit; [B, C] each."""

    token: Tensor
    logit: Tensor
    perturbed: Tensor


def _sample(x_BCW: Tensor, draw: Draw, first: int) -> _Sample:
    uniform_BCW = draw.uniform(x_BCW.shape[1], first, first + x_BCW.shape[-1])
    local_BC1 = sample_gumbel(x_BCW, uniform_BCW)[..., None]
    logit_BC = x_BCW.gather(-1, local_BC1).squeeze(-1)
    noise_BC = -torch.log(-torch.log(uniform_BCW.gather(-1, local_BC1).squeeze(-1)))
    return _Sample(local_BC1.squeeze(-1) + first, logit_BC, logit_BC + noise_BC)


def _better(a: _Sample, b: _Sample) -> _Sample:
    """Ties go to a, whose tokens have the lower ids."""
    take_b = b.perturbed > a.perturbed
    return _Sample(*(torch.where(take_b, getattr(b, name), getattr(a, name)) for name in _Sample.__slots__))


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
    if a.sample is not None and b.sample is not None:
        merged.sample = _better(a.sample, b.sample)
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

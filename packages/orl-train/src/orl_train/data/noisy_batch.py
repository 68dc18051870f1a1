"""Noisy training samples for [clean | noisy] staircase training, seeded by sample index.

Everything random about a sample is a function of (seed, index), so the loss does not depend on how samples are split
over ranks or micro-batches. Shape legend: B batch, T packed tokens, N noisy tokens, d width.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orl_core.noise import Family, sample_levels
from orl_core.visibility import PADDING_SEGMENT, Visibility, staircase


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Which tokens noise may draw from and how text ends: ids of the family's alphabet."""

    vocab_size: int
    pad_id: int
    mask_id: int | None


@dataclass(frozen=True, slots=True)
class NoiseSettings:
    """How blocks are corrupted while training.

    low, high: noise levels t ~ U(low, high), stratified over a sample's blocks.
    pure_share: share of blocks that are noise throughout (t = 1), the state in which decoding starts.
    suffix_share: share of blocks corrupted from a random position on (their beginning is clean), as decoding that runs
    from left to right leaves them; within the suffix t ~ U(0.5, 1).
    """

    low: float = 0.05
    high: float = 1.0
    pure_share: float = 0.1
    suffix_share: float = 0.4


@dataclass(frozen=True, slots=True)
class NoisySample:
    """One response: clean tokens, and its noisy blocks.

    clean      int64 [clean tokens]  prompt and all blocks but the last
    target     int64 [N]   the answer, padded to whole blocks
    noisy      int64 [N]   what the denoiser reads
    corrupted  bool  [N]   where it was replaced
    visibility of [clean | noisy]
    """

    clean: Tensor
    target: Tensor
    noisy: Tensor
    corrupted: Tensor
    visibility: Visibility


def sample_generator(seed: int, index: int, purpose: str) -> torch.Generator:
    """The random numbers of one sample and purpose, independent of every other one."""
    digest = hashlib.sha256(f"{purpose}/{seed}/{index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def noise_probability(blocks: int, length: int, settings: NoiseSettings, generator: torch.Generator) -> Tensor:
    """Probability of corruption of every position, float32 [blocks, length]."""
    level = sample_levels(blocks, generator, settings.low, settings.high)
    choice = torch.rand(blocks, generator=generator)
    level = torch.where(choice < settings.pure_share, torch.ones(blocks), level)
    probability = level[:, None].expand(blocks, length).clone()
    cut = torch.randint(length, (blocks, 1), generator=generator)
    inside = 0.5 + 0.5 * torch.rand(blocks, 1, generator=generator)
    suffix = torch.where(torch.arange(length)[None] >= cut, inside, torch.zeros_like(inside))
    return torch.where((choice > 1 - settings.suffix_share)[:, None], suffix, probability)


def make_sample(
    prompt: Tensor,
    answer: Tensor,
    *,
    canvas_length: int,
    family: Family,
    tokens: TokenRange,
    settings: NoiseSettings,
    generator: torch.Generator,
) -> NoisySample:
    """prompt, answer: int64 token ids; the answer ends with its end token."""
    blocks = -(-len(answer) // canvas_length)
    target = torch.full((blocks * canvas_length,), tokens.pad_id, dtype=torch.int64)
    target[: len(answer)] = answer
    probability = noise_probability(blocks, canvas_length, settings, generator)
    hit = torch.rand(blocks, canvas_length, generator=generator) < probability

    def noise() -> Tensor:
        if family == "masked":
            assert tokens.mask_id is not None
            return torch.full_like(target, tokens.mask_id)
        return torch.randint(tokens.vocab_size, target.shape, generator=generator)

    clean_length = len(prompt) + (blocks - 1) * canvas_length
    return NoisySample(
        clean=torch.cat([prompt, target[: (blocks - 1) * canvas_length]]),
        target=target,
        noisy=torch.where(hit.flatten(), noise(), target),
        corrupted=hit.flatten(),
        visibility=staircase(len(prompt) + len(target), len(prompt), canvas_length, clean_length=clean_length),
    )


@dataclass(frozen=True, slots=True)
class NoisyBatch:
    """Samples padded to one length. ids, positions int64 [B, T]; mask bool [B, T, T];
    noisy bool [B, T] marks the noisy rows; target int64 and corrupted bool [B, T] are meaningful there."""

    ids: Tensor
    positions: Tensor
    mask: Tensor
    noisy: Tensor
    target: Tensor
    corrupted: Tensor


def _pad(rows: Sequence[Tensor], length: int, value: int | bool) -> Tensor:
    out = torch.full((len(rows), length), value, dtype=rows[0].dtype)
    for row, tensor in zip(out, rows, strict=True):
        row[: len(tensor)] = tensor
    return out


def collate(samples: Sequence[NoisySample], pad_id: int, multiple: int = 8) -> NoisyBatch:
    """Pads to the longest sample, rounded up to `multiple`."""
    longest = max(len(s.clean) + len(s.noisy) for s in samples)
    length = -(-longest // multiple) * multiple
    view = [s.visibility for s in samples]
    visibility = Visibility(
        segment=_pad([v.segment for v in view], length, PADDING_SEGMENT),
        position=_pad([v.position for v in view], length, 0),
        state=_pad([v.state for v in view], length, 0),
        limit=_pad([v.limit for v in view], length, 0),
    )
    blank = [torch.zeros(len(s.clean), dtype=torch.bool) for s in samples]
    return NoisyBatch(
        ids=_pad([torch.cat([s.clean, s.noisy]) for s in samples], length, pad_id),
        positions=visibility.position,
        mask=visibility.dense_mask(),
        noisy=_pad(
            [torch.cat([b, torch.ones_like(s.corrupted)]) for b, s in zip(blank, samples, strict=True)], length, False
        ),
        target=_pad([torch.cat([s.clean, s.target]) for s in samples], length, pad_id),
        corrupted=_pad([torch.cat([b, s.corrupted]) for b, s in zip(blank, samples, strict=True)], length, False),
    )

"""Replaying random draws that were made elsewhere, so that the loop takes the decisions of another implementation.

Shape legend: B rows, C canvas, N blocks of the answer, S steps of all its blocks one after another.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dlmrt.loop.capture import Capture
from dlmrt.loop.draws import BlockDraws, Draw
from dlmrt.loop.host import HostDriver
from dlmrt.loop.step import Denoising
from dlmrt.vocab import VocabularyPass, VocabularyStats
from orl_core.rng import Stream


class RecordedDraws(BlockDraws):
    """A DrawSource of one row that reads from a recording.

    initial_NC    noise that each block begins with
    renoise_SC    tokens that each step draws for positions that it does not accept
    candidate_SC  tokens that each step samples
    first_N       index of each block's first step
    """

    def __init__(self, initial_NC: Tensor, renoise_SC: Tensor, candidate_SC: Tensor, first_N: Tensor) -> None:
        self.initial_NC, self.renoise, self.candidate_SC, self.first_N = initial_NC, renoise_SC, candidate_SC, first_N

    def begin(self, seed_B: Tensor, block_B: Tensor) -> None:
        """Nothing: the draws are there."""

    def tokens(self, stream: Stream, block_B: Tensor, step_B: Tensor, length: int, vocab_size: int) -> Tensor:
        if stream is Stream.CANVAS:
            return self.initial_NC[block_B]
        return self.at_step(self.renoise, block_B, step_B)

    def at_step(self, drawn_SC: Tensor, block_B: Tensor, step_B: Tensor) -> Tensor:
        """Clamped: where this loop takes a step more than the recording, the tokens differ and the caller will see."""
        return drawn_SC[(self.first_N[block_B.clamp(max=len(self.first_N) - 1)] + step_B).clamp(max=len(drawn_SC) - 1)]


@dataclass(frozen=True, kw_only=True)
class _RecordedVocabulary(VocabularyPass):
    """Samples as ever, which costs what it costs, and puts the recorded candidates in place of the sampled ones."""

    draws: RecordedDraws

    def __call__(
        self, hidden_BCd: Tensor, temperature_B: Tensor, draw: Draw | None, **options: object
    ) -> VocabularyStats:
        seen = VocabularyPass.__call__(self, hidden_BCd, temperature_B, draw, **options)  # type: ignore[arg-type]
        if draw is None:
            return seen
        candidate_BC = self.draws.at_step(self.draws.candidate_SC, draw.block, draw.step)
        return replace(seen, tokens=replace(seen.tokens, candidate=candidate_BC))


class ReplayDriver(HostDriver):
    """The host driver, but for the draws, which are recorded ones."""

    name = "replay"

    def __init__(self, draws: RecordedDraws) -> None:
        self.draws = draws

    def run(self, denoising: Denoising, capture: Capture | None = None) -> Iterator[int]:
        if denoising.draws is not self.draws:  # the answer's first block, whose noise has been drawn already
            state, no_step = denoising.state, torch.zeros_like(denoising.block)
            noise = self.draws.tokens(Stream.CANVAS, denoising.block, no_step, state.canvas.shape[-1], 0)
            for buffer in (state.canvas, state.answer):
                buffer.copy_(torch.where(state.editable, noise, buffer))
            denoising.draws = self.draws
            settings = {field.name: getattr(denoising.vocabulary, field.name) for field in fields(VocabularyPass)}
            denoising.vocabulary = _RecordedVocabulary(**settings, draws=self.draws)
        return super().run(denoising, capture)

"""Draws of a block's noise, made at once, and of a step's candidates, a chunk of the vocabulary at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from orl_core.rng import CounterRng, Stream, philox


class BlockDraws:
    """A DrawSource whose renoising tokens of every step of the block come from one vectorised Philox call.

    The numbers are those of CounterRng(seed_B). A step then only looks its row up: a hundred small integer operations a
    step would cost more than a small model's forward. Shape legend: B rows, C canvas.
    """

    def __init__(self, rows: int, length: int, steps: int, vocab_size: int, device: torch.device) -> None:
        self.steps, self.vocab_size = steps, vocab_size
        self.rng = CounterRng(torch.zeros(rows, dtype=torch.int64, device=device))
        self.renoise = torch.zeros(rows, steps, length, dtype=torch.int64, device=device)
        self._rows = torch.arange(rows, device=device)

    def begin(self, seed_B: Tensor, block_B: Tensor) -> None:
        """Draws block `block_B` of the rows with the seeds `seed_B` (both int64 [B])."""
        self.rng.seed_B.copy_(seed_B)
        rows, steps, length = self.renoise.shape
        every = CounterRng(seed_B.repeat_interleave(steps))
        block, step = block_B.repeat_interleave(steps), torch.arange(steps, device=seed_B.device).repeat(rows)
        tokens = every.tokens(Stream.RENOISE, block, step, length, self.vocab_size)
        self.renoise.copy_(tokens.view(rows, steps, length))

    def tokens(self, stream: Stream, block_B: Tensor, step_B: Tensor, length: int, vocab_size: int) -> Tensor:
        if stream is Stream.RENOISE:
            return self.renoise[self._rows, step_B.clamp(max=self.steps - 1)]
        return self.rng.tokens(stream, block_B, step_B, length, vocab_size)

    def uniform(self, stream: Stream, block_B: Tensor, step_B: Tensor, length: int, lanes: int) -> Tensor:
        return self.rng.uniform(stream, block_B, step_B, length, lanes)


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

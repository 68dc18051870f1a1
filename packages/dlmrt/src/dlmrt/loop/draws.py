"""Draws of a whole block, made at once."""

import torch
from torch import Tensor

from orl_core.rng import CounterRng, Stream


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

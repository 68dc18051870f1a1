"""Recording every denoising step of a block into preallocated buffers.

Shape legend: S steps, B rows, C canvas, d width.
"""

import torch
from torch import Tensor

from dlmrt.loop.step import Denoising
from orl_core.trajectory import BlockTrace

_FIRST_PAGE = 8


class Capture:
    """Buffers [S, B, ...] of what each step consumed and predicted; reused from block to block, doubled when full."""

    def __init__(self, denoising: Denoising) -> None:
        state = denoising.state
        self.denoising = denoising
        self._buffers = [
            torch.empty((_FIRST_PAGE, *like.shape), dtype=like.dtype, device=like.device)
            for like in (state.canvas, denoising.z, state.unresolved, denoising.entropy, denoising.top_prob)
        ]

    def before(self, step: int) -> None:
        """Records what step number `step` is about to consume."""
        if step == len(self._buffers[0]):
            self._buffers = [torch.cat([buffer, torch.empty_like(buffer)]) for buffer in self._buffers]
        canvas, z, unresolved, _, _ = self._buffers
        canvas[step].copy_(self.denoising.state.canvas)
        z[step].copy_(self.denoising.z)
        unresolved[step].copy_(self.denoising.state.unresolved)

    def after(self, step: int) -> None:
        """Records what step number `step` predicted."""
        _, _, _, entropy, top_prob = self._buffers
        entropy[step].copy_(self.denoising.entropy)
        top_prob[step].copy_(self.denoising.top_prob)

    def trace(self, row: int, steps: int, width: int, tokens: Tensor, block: int, start: int) -> BlockTrace:
        """A copy of the first `steps` steps and `width` positions of one row."""
        canvas, z, unresolved, entropy, top_prob = (buffer[:steps, row, :width].clone() for buffer in self._buffers)
        return BlockTrace(canvas, z, unresolved, entropy, top_prob, tokens[:width].clone(), block, start)

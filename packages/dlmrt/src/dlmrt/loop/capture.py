"""Recording every denoising step of a block: snapshots of the loop's static buffers, handed to orl-core's capture.

Shape legend: B rows, C canvas, d width.
"""

from torch import Tensor

from dlmrt.loop.step import Denoising
from orl_core.capture import CaptureMode, PageShape, StateCapture, StatePages


class Capture(StateCapture):
    """What each step of a Denoising consumed and predicted; a context manager. The pages are allocated once.

    The next step overwrites the buffers, so they are copied on their own device; everything else is the worker's.
    Raises CaptureMemoryError if the pages do not fit into memory.
    """

    def __init__(self, denoising: Denoising, mode: CaptureMode = "async") -> None:
        z, steps = denoising.z, denoising.decoder.max_steps
        shape = PageShape(rows=z.shape[0], steps=steps, canvas=z.shape[1], width=z.shape[2], dtype=z.dtype)
        super().__init__(StatePages(shape, pinned=z.is_cuda), mode)
        self.denoising = denoising
        self._consumed: tuple[Tensor, Tensor, Tensor] | None = None

    def before(self) -> None:
        """Takes what the coming step is about to consume."""
        state = self.denoising.state
        self._consumed = (state.canvas.clone(), self.denoising.z.clone(), state.unresolved.clone())

    def after(self, step: int) -> None:
        """Records step number `step` (0-based), which has just predicted."""
        assert self._consumed is not None, "before() comes before after()"
        self.record(step, *self._consumed, self.denoising.entropy.clone(), self.denoising.top_prob.clone())

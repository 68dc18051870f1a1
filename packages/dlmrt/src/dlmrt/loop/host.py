"""The host driver: a Python loop that reads the done flag after each step. Works on any device."""

from collections.abc import Iterator

from dlmrt.errors import NumericsError
from dlmrt.loop.capture import Capture
from dlmrt.loop.step import Denoising


class HostDriver:
    """Runs a block step by step. Every driver gives the same tokens."""

    name = "host"

    def run(self, denoising: Denoising, capture: Capture | None = None) -> Iterator[int]:
        """Denoises a block that has begun, yielding the number of steps taken after each one.

        Between two steps the caller may read the buffers, or stop iterating to abandon the block.
        Raises NumericsError if the model's logits are not finite.
        """
        for step in range(denoising.decoder.max_steps):
            if capture is not None:
                capture.before()
            denoising.step()
            if capture is not None:
                capture.after(step)
            running, not_finite = denoising.signal.tolist()
            if not_finite:
                raise NumericsError(
                    f"the model's logits are NaN or infinite at {not_finite} canvas positions of step {step + 1}; "
                    "check the checkpoint, or load it with dtype='float32'"
                )
            yield step + 1
            if not running:
                return
            if running < denoising.computed:
                denoising.skip_done()

"""Capture of denoising states: preallocated pages, filled beside the generation path by a worker or on it.

A rollout hands each step's tensors over and goes on; a worker thread copies them into host pages and, when a block
ends, copies each row's states out into a BlockTrace. On CUDA the worker copies on a stream of its own.
Shape legend: S steps, B rows, C canvas, d width.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor

from orl_core.errors import CaptureMemoryError, ConfigError, ShapeError, require_at_least
from orl_core.trajectory import BlockTrace

CaptureMode = Literal["async", "sync"]

_MIB = 2**20
_STEPS_IN_FLIGHT = 4  # steps handed over and not yet copied; generation waits beyond that, so memory stays fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """Room for the states of one block of every row: rows (rollouts at once), steps (the decoder's most), canvas,
    width (of z) and the dtype of z."""

    rows: int
    steps: int
    canvas: int
    width: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("rows", "steps", "canvas", "width"):
            require_at_least(name, getattr(self, name), 1)

    @property
    def nbytes(self) -> int:
        """canvas int64, z, unresolved bool, entropy and top_prob float32 of every position."""
        position = 8 + self.width * self.dtype.itemsize + 1 + 4 + 4
        return self.rows * self.steps * self.canvas * position

    def holds(self, other: "PageShape") -> bool:
        return (
            self.rows >= other.rows
            and self.steps >= other.steps
            and (self.canvas, self.width, self.dtype) == (other.canvas, other.width, other.dtype)
        )

    def check(self, limit_mib: int | None = None) -> None:
        """Raises CaptureMemoryError if the pages exceed `limit_mib` or the memory that is available now."""
        limit = None if limit_mib is None else limit_mib * _MIB
        for allowed, what in ((limit, "are allowed for them"), (available_memory(), "of memory are available")):
            if allowed is not None and self.nbytes > allowed:
                raise self._too_large(f"{allowed / _MIB:.0f} MiB {what}")

    def _too_large(self, why: str) -> CaptureMemoryError:
        return CaptureMemoryError(
            f"the states of {self.rows} rollouts of up to {self.steps} steps, with a canvas of {self.canvas} and a "
            f"width of {self.width}, need {self.nbytes / _MIB:.0f} MiB of pages, but {why}; roll out fewer answers at "
            "once or lower the decoder's max_steps"
        )


class StatePages:
    """Host buffers [S, B, ...] of a shape, allocated once.

    pinned: page-locked, for copies from a CUDA device. Raises CaptureMemoryError before anything is allocated if they
    do not fit (see PageShape.check).
    """

    def __init__(self, shape: PageShape, *, limit_mib: int | None = None, pinned: bool = False) -> None:
        shape.check(limit_mib)
        self.shape = shape
        size = (shape.steps, shape.rows, shape.canvas)

        def page(dtype: torch.dtype, *last: int) -> Tensor:
            return torch.empty(*size, *last, dtype=dtype, pin_memory=pinned)

        try:
            self._buffers = (
                page(torch.int64),
                page(shape.dtype, shape.width),
                page(torch.bool),
                page(torch.float32),
                page(torch.float32),
            )
        except RuntimeError as error:
            raise shape._too_large(f"they cannot be allocated ({error})") from error

    def write(self, step: int, tensors: tuple[Tensor, ...]) -> None:
        """Copies canvas, z, unresolved, entropy, top_prob ([B, C, ...] of at most the pages' rows) to `step`."""
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer[step, : len(tensor)].copy_(tensor)

    def trace(self, row: int, steps: int, width: int, tokens: Tensor, block: int, start: int) -> BlockTrace:
        """A copy of the first `steps` steps and `width` positions of one row."""
        canvas, z, unresolved, entropy, top_prob = (buffer[:steps, row, :width].clone() for buffer in self._buffers)
        return BlockTrace(canvas, z, unresolved, entropy, top_prob, tokens[:width].cpu().clone(), block, start)


class StateCapture:
    """Captures one block after the other; a context manager that has stopped its worker when it is left.

    mode: "async" copies in a worker thread, "sync" in the caller. Both give identical traces.
    """

    def __init__(self, pages: StatePages, mode: CaptureMode = "async") -> None:
        if mode not in ("async", "sync"):
            raise ConfigError(f"capture mode is {mode!r}; it must be 'async' or 'sync'")
        self.pages = pages
        self._worker = ThreadPoolExecutor(1, "orl-capture") if mode == "async" else None
        self._room = threading.BoundedSemaphore(_STEPS_IN_FLIGHT)
        self._written: list[Future[None]] = []
        self._stream: torch.cuda.Stream | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._worker is not None:
            self._worker.shutdown()
        if error is None:
            self._raise_failures()

    def record(
        self, step: int, canvas: Tensor, z: Tensor, unresolved: Tensor, entropy: Tensor, top_prob: Tensor
    ) -> None:
        """Takes what step number `step` (0-based) consumed (canvas, z, unresolved) and predicted (entropy, top_prob).

        Nobody may write to the tensors afterwards. Raises ShapeError for a step or rows beyond the pages.
        """
        shape = self.pages.shape
        if step >= shape.steps or len(canvas) > shape.rows:
            raise ShapeError(
                f"step {step} of {len(canvas)} rows does not fit pages of {shape.steps} steps and {shape.rows} rows"
            )
        tensors = (canvas, z, unresolved, entropy, top_prob)
        if self._worker is None:
            self.pages.write(step, tensors)
            return
        ready = _ready(canvas.device)
        self._room.acquire()
        self._written.append(self._worker.submit(self._write, step, tensors, ready))

    def trace(
        self, row: int, steps: int, width: int, tokens: Tensor, block: int, start: int
    ) -> Callable[[], BlockTrace]:
        """A call that returns (and waits for) the trace of a row of the block that has ended (see StatePages.trace).

        The next block's steps may be recorded at once: the pages are rewritten only after the trace is copied.
        """
        if self._worker is None:
            done = self.pages.trace(row, steps, width, tokens, block, start)
            return lambda: done
        return self._worker.submit(self.pages.trace, row, steps, width, tokens, block, start).result

    def _write(self, step: int, tensors: tuple[Tensor, ...], ready: torch.cuda.Event | None) -> None:
        try:
            with self._beside(ready):
                self.pages.write(step, tensors)
        finally:
            self._room.release()

    def _beside(self, ready: torch.cuda.Event | None) -> AbstractContextManager[object]:
        """On CUDA: a stream of the worker's own that waits for the generation's tensors, not the other way round."""
        if ready is None:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_event(ready)
        return torch.cuda.stream(self._stream)

    def _raise_failures(self) -> None:
        for written in self._written:
            written.result()


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping, None where the system does not tell (other than Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _ready(device: torch.device) -> torch.cuda.Event | None:
    """The point of the generation's stream at which the tensors handed over are complete."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event

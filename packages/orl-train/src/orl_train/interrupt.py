"""Ctrl-C at a moment when nothing is half done."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator


class Interrupt:
    """`requested` is True once Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.requested = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("interrupted: saving after this update; press Ctrl-C again to stop at once", file=sys.stderr)


def on_any_rank(accelerator: Accelerator, flag: bool) -> bool:
    """True on every rank if it is True on one: ranks stop after the same update."""
    if accelerator.num_processes == 1:
        return flag
    total: Any = accelerator.reduce(torch.tensor(float(flag), device=accelerator.device))
    return bool(total)


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Within the block the first Ctrl-C sets `requested` and the second raises KeyboardInterrupt.

    Signals reach the main thread only; in any other thread nothing changes.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, interrupt.handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)

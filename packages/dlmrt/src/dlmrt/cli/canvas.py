"""The canvas as one watches it settle in a terminal."""

import time
from collections.abc import Iterable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dlmrt.result import BlockCommitted, Draft, Event, Finished, GenerationResult

_FRAME_SECONDS = 1 / 30


def show_stream(events: Iterable[Event], console: Console) -> GenerationResult:
    """Prints an answer as it comes: on a terminal the canvas after each step, unresolved positions dim; elsewhere the
    text of each finished block. Returns the result."""
    return _animate(events, console) if console.is_terminal else _print_blocks(events, console)


def _print_blocks(events: Iterable[Event], console: Console) -> GenerationResult:
    for event in events:
        if isinstance(event, BlockCommitted):
            console.file.write(event.text)
            console.file.flush()
        elif isinstance(event, Finished):
            console.file.write(event.text + "\n")
            return event.result
    raise AssertionError("a stream ends with Finished")


def _animate(events: Iterable[Event], console: Console) -> GenerationResult:
    settled, last_frame = "", 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for event in events:
            if isinstance(event, Draft):
                if time.monotonic() - last_frame >= _FRAME_SECONDS:
                    last_frame = time.monotonic()
                    live.update(_tail(draft_text(settled, event), console), refresh=True)
            elif isinstance(event, BlockCommitted):
                settled += event.text
            else:
                break
        else:
            raise AssertionError("a stream ends with Finished")
    console.out(event.result.text, highlight=False)
    return event.result


def draft_text(settled: str, draft: Draft) -> Text:
    """Finished text, then the canvas with its unresolved positions dim."""
    return Text.assemble(settled, *((piece, "dim" if unresolved else "") for piece, unresolved in draft.pieces))


def _tail(text: Text, console: Console) -> Text:
    """The last lines that fit on the screen: a live display cannot scroll."""
    lines = text.wrap(console, console.width)
    return Text("\n").join(lines[-max(1, console.height - 2) :])

"""The metrics of a run in a file: a line of JSON an update."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def metrics_log(path: Path) -> Iterator[Callable[[dict[str, float]], None]]:
    """A callable that appends each update's metrics to `path` (JSON lines).

    A run that continues an older checkpoint repeats updates; their earlier lines are dropped.
    """
    with ExitStack() as opened:
        log: TextIO | None = None

        def write(metrics: dict[str, float]) -> None:
            nonlocal log
            if log is None:
                _drop_lines(path, metrics["step"])
                log = opened.enter_context(path.open("a"))
            log.write(json.dumps(metrics) + "\n")
            log.flush()

        yield write


def _drop_lines(path: Path, step: float) -> None:
    """Removes the lines of update `step` and later ones, and a line that a killed run left unfinished."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            if json.loads(line)["step"] < step:
                kept.append(line)
        except ValueError:
            continue
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(kept))
    temporary.replace(path)

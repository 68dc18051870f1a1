"""What the commands share: clean failure, overrides, threads, progress."""

import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import typer

from orl_core.errors import ConfigError, OrlError
from orl_core.threads import sleep_when_idle


@contextmanager
def fail_cleanly() -> Iterator[None]:
    """Turns the project's errors into one line and exit code 1, and Ctrl-C into exit code 130."""
    try:
        yield
    except OrlError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from error


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """["a.b=1"] -> {"a.b": 1}; values are TOML, and anything else is a string."""
    result: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not (name and sign):
            raise ConfigError(f"--set takes name=value, not {pair!r}")
        try:
            result[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            result[name] = text
    return result


def make_folder(path: Path) -> None:
    """Raises ConfigError if `path` cannot be a folder."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} is no folder and cannot be made one: {error}") from error


def set_threads(threads: int | None) -> None:
    """Limits the CPU threads of this process; idle threads sleep, since spinning ones slow a busy machine down."""
    sleep_when_idle()
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import torch

        torch.set_num_threads(threads)


def is_first_rank() -> bool:
    """Whether this process speaks for the run; launchers number the ranks in the environment."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def metrics_reporter(path: Path, total: int) -> Iterator[Callable[[dict[str, float]], None]]:
    """A callable that appends each update's metrics to `path` (JSON lines) and shows progress on stderr.

    A run that continues an older checkpoint repeats updates; their earlier lines are dropped.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = sys.stderr.isatty() and is_first_rank()
    with ExitStack() as opened, Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task("training", total=total)
        log: TextIO | None = None

        def report(metrics: dict[str, float]) -> None:
            nonlocal log
            if log is None:
                _drop_lines(path, metrics["step"])
                log = opened.enter_context(path.open("a"))
            log.write(json.dumps(metrics) + "\n")
            log.flush()
            progress.update(task, completed=metrics["step"], description=f"loss {metrics['loss']:.4f}")

        yield report


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

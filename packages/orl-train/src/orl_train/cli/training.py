"""How a command trains: the log and the display around a run, and its end."""

import gc
from collections.abc import Callable
from pathlib import Path

import typer

from orl_train.cli.common import is_first_rank, make_folder
from orl_train.cli.metrics import metrics_reporter

Report = Callable[[dict[str, float]], None]


def train(out: Path, updates: int, run: Callable[[Report], Path]) -> None:
    """Calls `run`, which reports each update's metrics and returns the final model's folder, and names that folder.

    Raises ConfigError if `out` cannot be a folder.
    """
    make_folder(out)
    with metrics_reporter(out / "metrics.jsonl", updates) as report:
        model = run(report)
    if is_first_rank():
        typer.echo(f"model: {model}")
    end_ranks()


def end_ranks() -> None:
    """Ends the process group of `accelerate launch`, if there is one, after the run was let go.

    Threads of the group that live on until the interpreter ends can abort a process that had done its work.
    """
    from accelerate.state import PartialState

    gc.collect()
    PartialState().destroy_process_group()

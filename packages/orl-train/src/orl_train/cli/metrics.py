"""Metrics of a run: a line of JSON an update, and what a terminal shows of the newest."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from orl_train.cli.common import is_first_rank

_LINES = 20  # of a run whose output is no terminal


@contextmanager
def metrics_reporter(path: Path, total: int, *, quiet: bool = False) -> Iterator[Callable[[dict[str, float]], None]]:
    """A callable that appends each update's metrics to `path` (JSON lines) and shows them on stderr: the newest ones
    with a progress bar in a terminal, else a line now and then. quiet: shows nothing.

    A run that continues an older checkpoint repeats updates; their earlier lines are dropped.
    """
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    shown = is_first_rank() and not quiet
    live = shown and sys.stderr.isatty()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console)
    task = progress.add_task("training", total=total)
    evaluated: dict[str, float] = {}  # the last evaluation stays in sight
    with ExitStack() as opened:
        view = opened.enter_context(Live(progress, console=console, refresh_per_second=4)) if live else None
        log: TextIO | None = None

        def report(metrics: dict[str, float]) -> None:
            nonlocal log
            if log is None:
                _drop_lines(path, metrics["step"])
                log = opened.enter_context(path.open("a"))
            log.write(json.dumps(metrics) + "\n")
            log.flush()
            step = int(metrics["step"])
            evaluated.update({name: value for name, value in metrics.items() if name.startswith("dev_")})
            progress.update(task, completed=step)
            lines = describe(metrics | evaluated)
            if view is not None:
                view.update(Group(progress, *lines))
            elif shown and (step % max(1, total // _LINES) == 0 or step == total):
                print(f"update {step}/{total}: {'; '.join(lines)}", file=sys.stderr)

        yield report


def describe(metrics: dict[str, float]) -> list[str]:
    """The metrics of an update in a few lines for people; what a run does not measure is left out."""
    entropies = [(n.rpartition("_")[2], v) for n, v in metrics.items() if n.startswith("entropy_step_")]
    parts = [
        [
            ("loss {:.4f}", "loss"),
            ("prediction {:.4f}", "loss_prediction"),
            ("KL {:.4f}", "loss_kl"),
            ("AEC {:.2g}", "loss_aec"),
            ("gradient norm {:.2f}", "gradient_norm"),
            ("lr {:.2g}", "lr"),
        ],
        [("verified {:.0%}", "reward"), ("rollout TPF {:.2f}", "tpf"), ("residual/embedding {:.2f}", "residual_ratio")],
        [("dev accuracy {:.1%}", "dev_accuracy"), ("dev TPF {:.2f}", "dev_tpf")],
        [("rollout {:.1f} s", "seconds_rollout"), ("training {:.1f} s", "seconds_train"), ("{:.2f} s", "seconds")],
    ]
    lines = [", ".join(form.format(metrics[name]) for form, name in line if name in metrics) for line in parts]
    if entropies:
        lines.insert(2, "entropy, nats " + ", ".join(f"step {step}: {value:.2f}" for step, value in entropies))
    return [line for line in lines if line]


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

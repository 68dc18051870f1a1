"""Metrics of a run: its log, and what a terminal shows of the newest."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from orl_train.cli.common import is_first_rank
from orl_train.metrics_log import metrics_log

_LINES = 20  # of a run whose output is no terminal


@contextmanager
def metrics_reporter(path: Path, total: int) -> Iterator[Callable[[dict[str, float]], None]]:
    """A callable that logs each update's metrics to `path` (see `metrics_log`) and shows them on stderr: the newest
    ones with a progress bar in a terminal, else a line now and then."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    shown = is_first_rank()
    live = shown and sys.stderr.isatty()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console)
    task = progress.add_task("training", total=total)
    evaluated: dict[str, float] = {}  # the last evaluation stays in sight
    with ExitStack() as opened:
        write = opened.enter_context(metrics_log(path))
        view = opened.enter_context(Live(progress, console=console, refresh_per_second=4)) if live else None

        def report(metrics: dict[str, float]) -> None:
            write(metrics)
            step = int(metrics["step"])
            evaluated.update({name: value for name, value in metrics.items() if name.startswith("dev_")})
            progress.update(task, completed=step)
            if view is not None:
                view.update(Group(progress, *describe(metrics | evaluated)))
            elif shown and (step % max(1, total // _LINES) == 0 or step == total):
                print(f"update {step}/{total}: {'; '.join(describe(metrics | evaluated))}", file=sys.stderr)

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

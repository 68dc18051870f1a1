"""A finished evaluation as JSON, as a table, and as a file."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from orl_eval.errors import ReportError
from orl_eval.runner import Evaluation

FORMAT = 1


def as_dict(evaluation: Evaluation, *, answers: bool = False) -> dict[str, Any]:
    """Plain data, flat except for settings and versions; with `answers`, every scored answer as well.

    The keys are those of orl_eval.measures.Summary, and: format, task, split, seed, model, decoder, environment.
    """
    report = {
        "format": FORMAT,
        "task": evaluation.task,
        "split": evaluation.split,
        "seed": evaluation.seed,
        "model": evaluation.model,
        **asdict(evaluation.summary),
        "settings": evaluation.settings,
        "environment": evaluation.environment,
    }
    if answers:
        report["answers"] = [asdict(score) for score in evaluation.scores]
    return report


def as_table(evaluation: Evaluation) -> Table:
    """The aggregates for a reader."""
    summary = evaluation.summary
    title = f"{evaluation.model} on {evaluation.task}/{evaluation.split}, {summary.n} problems, seed {evaluation.seed}"
    table = Table("measure", "value", "note", title=title, title_justify="left")
    for name, share, interval, note in (
        ("accuracy", summary.accuracy, summary.accuracy_interval, "every step verified"),
        ("final accuracy", summary.final_accuracy, summary.final_accuracy_interval, "last number only"),
    ):
        table.add_row(name, f"{share:.1%}", f"95%: {interval[0]:.1%} to {interval[1]:.1%}; {note}")
    table.add_row("TPF", f"{summary.tpf:.2f}", f"tokens / forwards; mean over answers {summary.tpf_mean:.2f}")
    table.add_row(
        "TPF with commits", f"{summary.tpf_commit:.2f}", f"one more forward a block; mean {summary.tpf_commit_mean:.2f}"
    )
    table.add_row("tokens/s", f"{summary.tokens_per_second:.0f}", f"{summary.tokens} tokens in {summary.seconds:.1f} s")
    if summary.truncated:
        table.add_row("cut short", str(summary.truncated), "answers that ended at the token limit")
    return table


def check_destination(path: Path) -> None:
    """Raises ReportError if a report cannot be written to `path`; called before the work starts."""
    folder = path.parent
    if path.is_dir():
        raise ReportError(f"cannot save the report to {path}: it is a folder; give a file name")
    if not folder.is_dir():
        raise ReportError(f"cannot save the report to {path}: there is no folder {folder}; create it first")
    if not os.access(folder, os.W_OK):
        raise ReportError(f"cannot save the report to {path}: the folder {folder} is not writable")


def save(evaluation: Evaluation, path: Path) -> None:
    """Writes the report with its answers; the file is complete or absent. Raises ReportError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(as_dict(evaluation, answers=True), indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ReportError(f"cannot save the report to {path}: {error.strerror or error}") from error

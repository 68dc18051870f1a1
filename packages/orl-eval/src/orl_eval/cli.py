"""The command line of orl-eval."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from orl_core.errors import OrlError
from orl_core.threads import sleep_when_idle
from orl_eval import __version__
from orl_eval.endpoints import Answerer, DecodeSettings, LocalEngine, parse_options
from orl_eval.measures import Score, summarize
from orl_eval.report import as_dict, as_table, check_destination, save
from orl_eval.runner import Evaluation, check_request, evaluate
from orl_eval.tasks import TASKS, Task, get_task

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Evaluates diffusion language models: accuracy with its interval, and tokens per forward (TPF).",
)
messages = Console(stderr=True, highlight=False)


def show_version(asked: bool) -> None:
    if asked:
        print(f"orl-eval {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keeps `run` a command of its own; the options of the program itself."""
    sleep_when_idle()


@app.command()
def run(
    model: Annotated[str, typer.Option(help="A dlmrt model: embedded:NAME, a folder or a hub id.")],
    task: Annotated[str, typer.Option(help=f"One of: {', '.join(sorted(TASKS))}.")] = "arithmetic",
    limit: Annotated[int, typer.Option(help="Number of problems.")] = 200,
    seed: Annotated[int, typer.Option(help="Draws the problems; answer i is generated with seed + i.")] = 0,
    split: Annotated[str, typer.Option(help="Which problems: train, dev or test.")] = "test",
    decoder: Annotated[str | None, typer.Option(help="Decoder in place of the model's own.")] = None,
    decoder_option: Annotated[
        list[str] | None, typer.Option(help="A decoder setting, NAME=NUMBER, e.g. entropy_bound=0.05; repeatable.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Token limit in place of the model's own.")] = None,
    residual: Annotated[bool, typer.Option(help="Use the residual context.")] = True,
    save_to: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Also write the report with every answer as JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Answer and verify the problems of a task, one request at a time."""
    try:
        chosen = get_task(task)
        check_request(chosen, split, limit, seed)
        if save_to is not None:
            check_destination(save_to)
        settings = DecodeSettings(decoder, parse_options(decoder_option or []), temperature, residual, max_new_tokens)
        answerer = LocalEngine.load(model, settings)
        evaluation = evaluate_with_progress(chosen, answerer, split, limit, seed)
        if save_to is not None:
            save(evaluation, save_to)
    except OrlError as error:
        messages.print(f"error: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        messages.print("interrupted; nothing was saved")
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps(as_dict(evaluation)))
    else:
        Console().print(as_table(evaluation))


def evaluate_with_progress(task: Task, answerer: Answerer, split: str, limit: int, seed: int) -> Evaluation:
    """`evaluate` with a bar on stderr if that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    scores: list[Score] = []
    with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as progress:
        bar = progress.add_task(answerer.model, total=limit)

        def show(score: Score) -> None:
            scores.append(score)
            so_far = summarize(scores)
            progress.update(bar, advance=1, description=f"accuracy {so_far.accuracy:.1%}  TPF {so_far.tpf:.2f}")

        return evaluate(task, answerer, split=split, limit=limit, seed=seed, on_score=show)

"""dlmrt generate: one answer."""

import json
import time
from typing import Annotated, Any

import typer

from dlmrt.cli.common import (
    DeviceOption,
    DriverOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    RevisionOption,
    ThreadsOption,
    load_engine,
    with_request_options,
)


@with_request_options
def generate(
    prompt: Annotated[str, typer.Argument(help="The question or instruction.")],
    *,
    params: dict[str, Any],
    model: ModelOption = None,
    json_: JsonOption = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print each block as soon as it is final.")] = False,
    show_draft: Annotated[bool, typer.Option("--show-draft", help="Watch the canvas settle.")] = False,
    n: Annotated[int, typer.Option("--n", help="Answers, with the seeds SEED, SEED + 1, ...")] = 1,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="With --json: each token's log-probability.")] = False,
    revision: RevisionOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    driver: DriverOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Answer a prompt."""
    from dlmrt.cli import STARTED
    from dlmrt.engine import Engine  # noqa: F401 - imported here so that its time counts as import and not as load
    from dlmrt.params import GenerationParams

    settings = GenerationParams(**params, n=n, logprobs=logprobs)
    imported = time.perf_counter()
    engine = load_engine(model, revision, device, dtype, driver, threads)
    loaded = time.perf_counter()
    if json_:
        results = engine.generate_all(prompt, settings) if n > 1 else [engine.generate(prompt, settings)]
        seconds = {"imports": imported - STARTED, "load": loaded - imported}
        answers = [result.to_dict() for result in results]
        for answer in answers:
            answer["timings"] = {**seconds, **answer["timings"]}
        typer.echo(json.dumps({"answers": answers} if n > 1 else answers[0], ensure_ascii=False))
        return
    from dlmrt.cli.summary import summary

    if stream or show_draft:
        from rich.console import Console

        from dlmrt.cli.canvas import show_stream

        results = [show_stream(engine.stream(prompt, settings, drafts=show_draft), Console())]
    else:
        results = engine.generate_all(prompt, settings) if n > 1 else [engine.generate(prompt, settings)]
        for result in results[:-1]:
            typer.echo(result.text)
            typer.secho(summary(result), dim=True)
        typer.echo(results[-1].text)
    typer.secho(summary(results[-1]), dim=True)

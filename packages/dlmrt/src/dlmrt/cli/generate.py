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

    settings = GenerationParams(**params)
    imported = time.perf_counter()
    engine = load_engine(model, revision, device, dtype, driver, threads)
    loaded = time.perf_counter()
    if json_:
        result = engine.generate(prompt, settings)
        seconds = {"imports": imported - STARTED, "load": loaded - imported}
        raw = result.to_dict()
        raw["timings"] = {**seconds, **raw["timings"]}
        typer.echo(json.dumps(raw, ensure_ascii=False))
        return
    if stream or show_draft:
        from rich.console import Console

        from dlmrt.cli.canvas import show_stream

        result = show_stream(engine.stream(prompt, settings, drafts=show_draft), Console())
    else:
        result = engine.generate(prompt, settings)
        typer.echo(result.text)
    from dlmrt.cli.summary import summary

    typer.secho(summary(result), dim=True)

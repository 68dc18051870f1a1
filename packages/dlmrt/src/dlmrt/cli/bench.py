"""dlmrt bench: tokens per second, tokens per forward, latency, memory."""

import json
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
def bench(
    *,
    params: dict[str, Any],
    model: ModelOption = None,
    json_: JsonOption = False,
    prompts: Annotated[int, typer.Option(min=1, help="Different prompts.")] = 16,
    repeat: Annotated[int, typer.Option(min=1, help="Times that each prompt is answered.")] = 3,
    revision: RevisionOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    driver: DriverOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Measure a model: held-out word problems on an embedded one, random token ids on any other."""
    from dlmrt.benchmark import measure
    from dlmrt.params import GenerationParams

    settings = GenerationParams(**params)
    engine = load_engine(model, revision, device, dtype, driver, threads)
    report = measure(engine, settings, prompts=prompts, repeat=repeat)
    if json_:
        typer.echo(json.dumps(report.to_dict()))
        return
    for label, value in report.lines():
        typer.echo(f"{label:<14} {value}")

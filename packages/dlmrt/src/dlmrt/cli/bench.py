"""dlmrt bench: tokens per second, tokens per forward, latency, memory."""

import json
from contextlib import ExitStack
from typing import Annotated, Any, Literal

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
    compare: Annotated[
        Literal["transformers"] | None, typer.Option(help="Run it too: same draws, same tokens; how much faster?")
    ] = None,
) -> None:
    """Measure a model: held-out word problems on an embedded one, random token ids on any other.

    --model random:diffusion_gemma is a small DiffusionGemma of random weights.
    """
    import torch

    from dlmrt.benchmark import measure, random_engine
    from dlmrt.checkpoint.embedded import DEFAULT_MODEL
    from dlmrt.checkpoint.hub import resolve
    from dlmrt.checkpoint.random_model import PREFIX, random_folder
    from dlmrt.params import GenerationParams

    settings = GenerationParams(**params)
    if threads is not None:
        torch.set_num_threads(threads)
    with ExitStack() as stack:
        if model is not None and model.startswith(PREFIX):
            folder = stack.enter_context(random_folder(model))
            engine = random_engine(model, folder, device=device, dtype=dtype, driver=driver)
        else:
            folder = resolve(model or DEFAULT_MODEL, revision)
            engine = load_engine(model, revision, device, dtype, driver, threads)
        if compare is None:
            report = measure(engine, settings, prompts=prompts, repeat=repeat)
        else:
            from dlmrt.compare import compare as run_beside

            report = run_beside(engine, folder, settings, prompts=prompts, repeat=repeat)
    if json_:
        typer.echo(json.dumps(report.to_dict()))
        return
    for label, value in report.lines():
        typer.echo(f"{label:<14} {value}")

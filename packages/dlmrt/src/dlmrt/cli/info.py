"""dlmrt info: what a checkpoint is, from its configs and safetensors headers alone."""

import json
from typing import Annotated

import typer

from dlmrt.cli.common import JsonOption, RevisionOption, reported_errors


def info(
    model: Annotated[str, typer.Argument(help='"embedded:NAME", a folder or a hub id.')],
    json_: JsonOption = False,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens to plan memory for.")] = None,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto",
    revision: RevisionOption = None,
) -> None:
    """Describe a model: family, parameters, canvas, decoder, memory at a context. Loads no weights."""
    with reported_errors():
        from dlmrt.checkpoint.describe import describe

        description = describe(model, revision=revision, context=context, dtype=dtype)
        if json_:
            typer.echo(json.dumps(description.to_dict()))
            return
        for label, value in description.lines():
            typer.echo(f"{label:<12} {value}")

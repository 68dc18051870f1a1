"""orl-train convert."""

from pathlib import Path
from typing import Annotated

import typer

from orl_train.cli.common import fail_cleanly


def convert(
    source: Annotated[str, typer.Argument(help="Qwen3 checkpoint: a folder, or a hub id such as Qwen/Qwen3-0.6B.")],
    out: Annotated[Path, typer.Option(help="Folder of the QwenDLM start model.")],
    canvas_length: Annotated[int, typer.Option(help="Tokens denoised together.")] = 256,
    family: Annotated[str, typer.Option(help="State family: uniform or masked.")] = "uniform",
    mask_token: Annotated[
        str | None,
        typer.Option(help="Masked family: an existing token, or a new one for an unused row (default: <|MASK|>)."),
    ] = None,
    residual_size: Annotated[
        int | None, typer.Option(help="Width of the residual adapter; 0 for none (default: twice the model's width).")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a model folder at OUT.")] = False,
) -> None:
    """Turn a Qwen3 checkpoint into a QwenDLM start model: same weights, new config, untrained residual adapter."""
    with fail_cleanly():
        from orl_train.convert import ConvertConfig
        from orl_train.convert import convert as run

        config = ConvertConfig(
            canvas_length=canvas_length,
            family=family,  # pyright: ignore[reportArgumentType] - checked by the class
            mask_token=mask_token,
            residual_size=residual_size,
        )
        typer.echo(f"model: {run(source, out, config, revision=revision, force=force)}")

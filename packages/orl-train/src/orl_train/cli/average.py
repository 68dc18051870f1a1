"""orl-train average."""

from pathlib import Path
from typing import Annotated

import typer

from orl_train.cli.common import fail_cleanly


def average(
    sources: Annotated[list[str], typer.Argument(help="Model folders, two or more, or embedded:base and the like.")],
    out: Annotated[Path, typer.Option(help="Folder of the averaged model.")],
) -> None:
    """Average the weights of models that were trained from one start (a model soup)."""
    with fail_cleanly():
        from orl_train.average import average as run

        typer.echo(f"model: {run(sources, out)}")

"""Command line of orl-train. Commands import torch only when they run, so that `--help` is quick."""

import sys
from typing import Annotated

import typer

from orl_train import __version__
from orl_train.cli import average as _average
from orl_train.cli import bench as _bench
from orl_train.cli import convert as _convert
from orl_train.cli import orl as _orl
from orl_train.cli import pretrain as _pretrain
from orl_train.cli import reproduce as _reproduce

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Train block-diffusion language models.")


def _version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train block-diffusion language models."""
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]


app.command("convert")(_convert.convert)
app.command("pretrain")(_pretrain.pretrain)
app.command("orl")(_orl.orl)
app.command("average")(_average.average)
app.command("bench")(_bench.bench)
app.command("reproduce")(_reproduce.reproduce)

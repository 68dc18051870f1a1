"""Command line of dlmrt. torch is imported inside the commands, so that --help is fast."""

import sys
import time

STARTED = time.perf_counter()  # read by commands that report their cold start

from typing import Annotated  # noqa: E402

import typer  # noqa: E402

from dlmrt.cli.bench import bench  # noqa: E402
from dlmrt.cli.chat import chat  # noqa: E402
from dlmrt.cli.generate import generate  # noqa: E402
from dlmrt.cli.info import info  # noqa: E402
from dlmrt.cli.quantize import quantize  # noqa: E402
from orl_core.threads import sleep_when_idle  # noqa: E402

app = typer.Typer(
    name="dlmrt",
    help="Inference engine for diffusion language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, chat, info, bench, quantize):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        from dlmrt import __version__

        typer.echo(f"dlmrt {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    sleep_when_idle()


def main() -> None:
    """Entry point of the `dlmrt` script."""
    try:
        app()
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)

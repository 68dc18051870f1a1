"""dlmrt quantize: an NVFP4 checkpoint from an unquantised one."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dlmrt.cli.common import JsonOption, RevisionOption, reported_errors


def quantize(
    source: Annotated[str, typer.Argument(help='"embedded:NAME", a folder or a hub id.')],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist or be empty.")],
    dialect: Annotated[str, typer.Option(help="compressed-tensors or modelopt.")] = "compressed-tensors",
    json_: JsonOption = False,
    revision: RevisionOption = None,
) -> None:
    """Write an NVFP4 checkpoint: projections in 4 bits, all else as it is. Reports each layer's error."""
    with reported_errors():
        from rich.console import Console
        from rich.progress import Progress

        from dlmrt.quantize import quantize_folder

        quiet = json_ or not sys.stderr.isatty()
        with Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress:
            task = progress.add_task("tensors", total=None)

            def show(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

            report = quantize_folder(source, out, dialect, revision=revision, progress=show)  # type: ignore[arg-type]
        if json_:
            typer.echo(json.dumps(report.to_dict()))
            return
        typer.echo(f"{'layer':>5} {'matrices':>8} {'parameters':>14} {'error':>8} {'worst':>8}")
        for layer in report.layers:
            typer.echo(
                f"{layer.layer:>5} {layer.matrices:>8} {layer.parameters:>14,} {layer.relative_error:>8.4f} "
                f"{layer.worst_error:>8.4f} {layer.worst}"
            )
        before, after = (size / 2**20 for size in (report.bytes_before, report.bytes_after))
        typer.echo(f"{report.target}: {after:.1f} MiB of tensors, {before:.1f} MiB before")

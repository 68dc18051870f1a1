"""orl-train reproduce."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from orl_train.cli.common import fail_cleanly, make_folder, parse_overrides, set_threads


def reproduce(
    config: Annotated[Path, typer.Argument(help="TOML file with the settings, such as recipes/reproduce.toml.")],
    out: Annotated[Path, typer.Option(help="Folder for arms, measurements and the report.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting: name=value, such as dev_problems=100.")
    ] = None,
    family: Annotated[list[str] | None, typer.Option(help="Only this family: uniform or masked.")] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this arm, repeatable: base, orl, orl-2, no-aec, no-kl, no-residual, off-policy, rsft, pretrain."
        ),
    ] = None,
    docs: Annotated[
        Path | None,
        typer.Option(help="Also put the tables between the marks of this document, picture and JSON beside it."),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads (default: all).")] = None,
) -> None:
    """Train ORL, its ablations and controls, measure all of them at many thresholds, and write the report.

    The same command continues where it was stopped. Several processes may share one OUT: each takes arms that no other
    one holds.
    """
    with fail_cleanly():
        set_threads(threads)
        from orl_train.reproduce import load_study
        from orl_train.reproduce import reproduce as run
        from orl_train.reproduce.document import update_document

        settings = load_study(config, parse_overrides(set_ or []))
        families: Any = family or ()
        make_folder(out)
        run(
            settings,
            out,
            families=families,
            arms=arm or (),
            say=lambda text: typer.echo(text, err=True),
            command=shlex.join(["orl-train", *sys.argv[1:]]),
        )
        if docs is not None:
            update_document(docs, out)
        typer.echo(f"report: {out / 'report.md'}")

"""orl-train pretrain."""

from pathlib import Path
from typing import Annotated

import typer

from orl_train.cli.common import Tracker, fail_cleanly, parse_overrides, set_threads
from orl_train.cli.training import train


def pretrain(
    config: Annotated[Path, typer.Argument(help="TOML file with the settings, such as recipes/base.toml.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, metrics.jsonl and the final model.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting: name=value, such as optimizer.muon_lr=0.01.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Continue from the newest checkpoint in OUT.")] = True,
    tracker: Tracker = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads (default: all).")] = None,
) -> None:
    """Train a block-diffusion model from scratch on arithmetic word problems."""
    with fail_cleanly():
        set_threads(threads)
        from orl_train.config import load_config
        from orl_train.pretrain import PretrainConfig
        from orl_train.pretrain import pretrain as run

        settings = load_config(PretrainConfig, config, parse_overrides(set_ or []))
        train(out, settings.steps, lambda report: run(settings, out, resume=resume, report=report, tracker=tracker))

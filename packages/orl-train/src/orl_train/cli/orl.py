"""orl-train orl."""

from pathlib import Path
from typing import Annotated, Any

import typer

from orl_train.cli.common import Tracker, fail_cleanly, parse_overrides, set_threads
from orl_train.cli.training import train


def orl(
    config: Annotated[Path, typer.Argument(help="TOML file with the settings, such as recipes/orl.toml.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, metrics.jsonl and the final model.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting: name=value, such as loss.rho=0.3.")
    ] = None,
    start: Annotated[str | None, typer.Option(help="Folder of the start model (overrides the file's).")] = None,
    off_policy: Annotated[bool, typer.Option(help="Ablation: roll out with the start model.")] = False,
    aec: Annotated[bool, typer.Option(help="Adjacent entropy contraction.")] = True,
    kl: Annotated[bool, typer.Option(help="Capped reverse KL to the start model.")] = True,
    residual: Annotated[bool, typer.Option(help="Residual context in rollouts and replay.")] = True,
    gate: Annotated[bool, typer.Option(help="Train only uncertain positions; without it, all unresolved ones.")] = True,
    resume: Annotated[bool, typer.Option(help="Continue from the newest checkpoint in OUT.")] = True,
    tracker: Tracker = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads (default: all).")] = None,
) -> None:
    """On-policy residual learning: train a model on its own verified answers, in the states it visited."""
    with fail_cleanly():
        set_threads(threads)
        from orl_train.config import load_config
        from orl_train.orl import OrlConfig, OrlRun

        overrides: dict[str, Any] = parse_overrides(set_ or [])
        if start is not None:
            overrides["start"] = start
        overrides |= {"off_policy": True} if off_policy else {}
        overrides |= {} if aec else {"loss.aec_weight": 0.0}
        overrides |= {} if kl else {"loss.kl_weight": 0.0}
        overrides |= {} if residual else {"residual": False}
        overrides |= {} if gate else {"loss.gate_entropy": 0.0}
        settings = load_config(OrlConfig, config, overrides)
        train(
            out,
            settings.updates,
            lambda report: OrlRun(settings, out, tracker=tracker).run(resume=resume, report=report),
        )

"""What the commands share: clean failure, overrides, threads."""

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from orl_core.errors import ConfigError, OrlError
from orl_core.threads import sleep_when_idle

Tracker = Annotated[
    str, typer.Option(help="Where metrics go besides metrics.jsonl: auto (TensorBoard if installed), none, wandb, ...")
]


@contextmanager
def fail_cleanly() -> Iterator[None]:
    """Turns the project's errors into one line and exit code 1, and Ctrl-C into exit code 130."""
    try:
        yield
    except OrlError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from error


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """["a.b=1"] -> {"a.b": 1}; values are TOML, and anything else is a string."""
    result: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not (name and sign):
            raise ConfigError(f"--set takes name=value, not {pair!r}")
        try:
            result[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            result[name] = text
    return result


def make_folder(path: Path) -> None:
    """Raises ConfigError if `path` cannot be a folder."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} is no folder and cannot be made one: {error}") from error


def set_threads(threads: int | None) -> None:
    """Limits the CPU threads of this process; idle threads sleep, since spinning ones slow a busy machine down."""
    sleep_when_idle()
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import torch

        torch.set_num_threads(threads)


def is_first_rank() -> bool:
    """Whether this process speaks for the run; launchers number the ranks in the environment."""
    return os.environ.get("RANK", "0") == "0"

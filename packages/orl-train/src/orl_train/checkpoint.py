"""Training checkpoints: written beside and renamed, so that a killed or failed save never leaves half of one.

A checkpoint is a folder `step-00000100` with `model/` (an ordinary Hugging Face folder), `state/` (accelerate:
optimizers, schedules, random states) and `run.json` (settings and position). `latest()` finds the newest complete one.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orl_train.errors import CheckpointError

_PREFIX = "step-"


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"{_PREFIX}{step:08d}"


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint below `folder`, or None."""
    found = sorted(p for p in folder.glob(f"{_PREFIX}*") if (p / "run.json").is_file() and not p.name.endswith(".tmp"))
    return found[-1] if found else None


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Calls `write(temporary folder)` and renames the result to `target`, replacing it. All or nothing.

    Raises CheckpointError (disk full, no permission) after removing the half-written folder; an existing `target` is
    untouched then.
    """
    temporary = target.with_name(target.name + ".tmp")
    old = target.with_name(target.name + ".old.tmp")
    try:
        _put_back(old, target)  # a run was killed between the two renames below
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        write(temporary)
        _sync([*temporary.rglob("*"), temporary])
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        _sync([target.parent])
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        _put_back(old, target)
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) or (isinstance(error, Exception) and _is_failed_write(error)):
            raise CheckpointError(
                f"cannot write {target}: {error}. Nothing was changed; make room or choose another folder, then run "
                "the same command again"
            ) from error
        raise


def _put_back(old: Path, target: Path) -> None:
    if old.exists() and not target.exists():
        old.rename(target)


def _is_failed_write(error: Exception) -> bool:
    """safetensors and torch.save report a full disk as errors of their own."""
    return any(sign in str(error) for sign in ("No space left", "I/O error", "inline_container", "PytorchStreamWriter"))


def _sync(paths: list[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError if the file is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints."""
    for path in sorted(p for p in folder.glob(f"{_PREFIX}*") if not p.name.endswith(".tmp"))[:-keep]:
        shutil.rmtree(path, ignore_errors=True)

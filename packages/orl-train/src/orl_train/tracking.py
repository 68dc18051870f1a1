"""Trackers of a run, through accelerate: TensorBoard, Weights & Biases and the others that it knows."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import ProjectConfiguration

from orl_core.errors import ConfigError

PROJECT = "orl-train"


def tracker_options(asked: str, out: Path) -> dict[str, Any]:
    """What `Accelerator` is built with so that it logs to `asked`; files go to `out`/tracking.

    asked: a tracker of accelerate, "none", or "auto": TensorBoard where it is installed.
    Raises ConfigError for a tracker that accelerate does not know or that is not installed.
    """
    installed = {tracker.value for tracker in get_available_trackers()}
    if asked == "auto":
        asked = "tensorboard" if "tensorboard" in installed else "none"
    if asked == "none":
        return {}
    if asked not in LOGGER_TYPE_TO_CLASS:
        raise ConfigError(f"tracker is {asked!r}; it must be auto, none, {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}")
    if asked not in installed:
        package = "orl-train[tensorboard]" if asked == "tensorboard" else asked
        raise ConfigError(f"tracker {asked!r} is not installed; install {package}, or use --tracker none")
    folders = ProjectConfiguration(project_dir=str(out), logging_dir=str(out / "tracking"))
    return {"log_with": asked, "project_config": folders}


@contextmanager
def tracking(accelerator: Accelerator, settings: dict[str, Any]) -> Iterator[None]:
    """Opens the accelerator's trackers, with the run's settings by their dotted names, and closes them at the end.

    `Accelerator.end_training` would end the process group as well.
    """
    accelerator.init_trackers(PROJECT, config=_flat(settings))
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
        accelerator.trackers.clear()


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    flat: dict[str, bool | int | float | str] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat

"""The checkpoints that are shipped inside the package."""

from pathlib import Path

from dlmrt.errors import CheckpointError

PREFIX = "embedded:"
DEFAULT_MODEL = "embedded:orl"
_ASSETS = Path(__file__).parent.parent / "assets"


def embedded_models() -> list[str]:
    """Names of the shipped checkpoints, such as "embedded:base"."""
    return sorted(PREFIX + config.parent.name for config in _ASSETS.glob("*/config.json"))


def embedded_folder(name: str) -> Path:
    """Folder of an embedded checkpoint. Raises CheckpointError for an unknown name."""
    if name not in embedded_models():
        raise CheckpointError(f"model {name!r} is not part of this package; it ships {embedded_models()}")
    return _ASSETS / name.removeprefix(PREFIX)

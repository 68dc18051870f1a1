"""Where a model lies: a folder, or a checkpoint that is shipped inside dlmrt."""

from hashlib import sha256
from pathlib import Path
from typing import Any

from orl_core.errors import ConfigError
from orl_train.config import to_dict

EMBEDDED = "embedded:"
_READ = 1 << 24  # bytes at once


def model_folder(name: str) -> Path:
    """Folder of the model `name`: a path, or "embedded:base" and the like.

    Raises ConfigError for a folder without a model, or where dlmrt is not installed; dlmrt's CheckpointError for an
    embedded name that it does not ship.
    """
    if name.startswith(EMBEDDED):
        try:
            from dlmrt.checkpoint.embedded import embedded_folder
        except ImportError as error:
            raise ConfigError(
                f"{name!r} is shipped with dlmrt, which is not installed; install orl-train[engine], or give a folder"
            ) from error
        return embedded_folder(name)
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{name!r} holds no model: there is no config.json; give a model folder or embedded:base")
    return folder


def fingerprint(folder: Path) -> str:
    """Hash of a model's weights: a copy of them elsewhere counts as the same model."""
    digest = sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while part := file.read(_READ):
                digest.update(part)
    return digest.hexdigest()[:16]


def by_weights(config: Any) -> dict[str, Any]:
    """A run's settings as nested dictionaries, its start and reference model named by their weights.

    Raises ConfigError as `model_folder` does.
    """
    models = {name: getattr(config, name, None) for name in ("start", "reference")}
    return to_dict(config) | {name: fingerprint(model_folder(where)) for name, where in models.items() if where}

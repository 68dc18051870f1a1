"""Where a model lies: a folder, or a checkpoint that is shipped inside dlmrt."""

from pathlib import Path

from orl_core.errors import ConfigError

EMBEDDED = "embedded:"


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

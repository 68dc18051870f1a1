"""From a model's name to a folder: an embedded checkpoint, a local folder or a Hugging Face hub id."""

import re
from pathlib import Path

from dlmrt.checkpoint.embedded import PREFIX, embedded_folder, embedded_models
from dlmrt.errors import CheckpointError

# Data only: no Python files, so a repository's own code cannot even be downloaded.
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(name: str | Path, revision: str | None = None) -> Path:
    """The folder of a model. Hub ids are downloaded to the hub cache, unless HF_HUB_OFFLINE is set.

    revision: branch, tag or commit of a hub id. Raises CheckpointError for a name that leads nowhere.
    """
    text = str(name)
    if text.startswith(PREFIX):
        return embedded_folder(text)
    folder = Path(name).expanduser()
    if text and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} has no config.json; a model is a folder in the Hugging Face layout")
        return folder
    if isinstance(name, Path) or not _HUB_ID.fullmatch(text) or text.startswith("."):
        raise CheckpointError(
            f"model {text!r} is unknown: it is no folder, no hub id (owner/name) and none of {embedded_models()}"
        )
    return _download(text, revision)


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"model {hub_id!r}{at} is neither a local folder nor to be had from the hub "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0]})"
        ) from error

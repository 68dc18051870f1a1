"""Files of a checkpoint to read from: a local folder or a Hugging Face hub id; safetensors only."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils.hub import cached_file, is_offline_mode  # pyright: ignore[reportPrivateImportUsage]

from orl_train.errors import CheckpointError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """Where a tensor lies, its shape and its size in bytes."""

    file: Path
    shape: tuple[int, ...]
    nbytes: int


class Source:
    """A checkpoint; hub files are downloaded to the hub cache when they are first asked for.

    name: folder or hub id ("Qwen/Qwen3-0.6B"). revision: branch, tag or commit of a hub id.
    """

    def __init__(self, name: str, revision: str | None = None) -> None:
        self.name, self.revision = name, revision
        folder = Path(name).expanduser()
        self.folder = folder if folder.is_dir() else None

    def find(self, file: str) -> Path | None:
        """Path of a file, None if the checkpoint has none. Raises CheckpointError if there is no such checkpoint."""
        if self.folder is not None:
            path = self.folder / file
            return path if path.is_file() else None
        try:
            found = cached_file(self.name, file, revision=self.revision)
        except (OSError, ValueError) as error:
            if "does not appear to have" in str(error) or is_offline_mode():
                return None
            raise CheckpointError(
                f"{self.name!r} is neither a folder nor a checkpoint to be had from the hub: {error}"
            ) from error
        return None if found is None else Path(found)

    def require(self, file: str, why: str) -> Path:
        """Path of a file. Raises CheckpointError, ending with `why`, if there is none."""
        found = self.find(file)
        if found is None:
            if self.folder is None and is_offline_mode():
                why = "it is no folder, and the hub cannot be asked while HF_HUB_OFFLINE is set"
            raise CheckpointError(f"{self.name} has no {file}; {why}")
        return found

    def json(self, file: str) -> dict[str, Any]:
        """A JSON object; empty if the file is missing. Raises CheckpointError if it is damaged."""
        path = self.find(file)
        if path is None:
            return {}
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{path} is no valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise CheckpointError(f"{path} must hold a JSON object")
        return data

    def weight_files(self) -> list[Path]:
        """The safetensors files in order. Raises CheckpointError if there are none, or only pickles."""
        single = self.find(_SINGLE)
        if single is not None:
            return [single]
        index = self.json(_INDEX)
        if index:
            names = sorted(set(index.get("weight_map", {}).values()))
            return [self.require(name, f"{_INDEX} names it: copy or download it again") for name in names]
        pickled = sorted(path.name for path in self.folder.glob("*.bin")) if self.folder else []
        if pickled:
            raise CheckpointError(
                f"{self.name} holds weights only as {', '.join(pickled[:3])}, a pickle, which may run code when it is "
                "loaded; save it as safetensors first (transformers: save_pretrained)"
            )
        raise CheckpointError(f"{self.name} has neither {_SINGLE} nor {_INDEX}; only safetensors are read")

    def tensors(self) -> dict[str, SourceTensor]:
        """Every tensor by name, from the files' headers. Raises CheckpointError for a damaged file."""
        found: dict[str, SourceTensor] = {}
        for file in self.weight_files():
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 - not a dict
                        view = opened.get_slice(name)
                        shape = tuple(view.get_shape())
                        found[name] = SourceTensor(file, shape, _nbytes(shape, view.get_dtype()))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read ({error}); copy or download it again") from error
        return found


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """dtype: the header's name of it, such as BF16 or F8_E4M3."""
    bits = int("".join(c for c in dtype.split("_")[0] if c.isdigit()) or 8)
    size = bits // 8
    for side in shape:
        size *= side
    return size

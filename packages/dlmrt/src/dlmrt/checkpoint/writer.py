"""Writing checkpoints: a safetensors file tensor by tensor, a folder as a whole or not at all."""

import ctypes
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from dlmrt.checkpoint.weights import TensorEntry
from dlmrt.errors import CheckpointError


class TensorWriter:
    """A safetensors file whose tensors are written one at a time, in any order, so that only one is in memory.

    entries: every tensor that the file will hold. Each must be written once before `close`.
    """

    def __init__(self, path: Path, entries: Mapping[str, TensorEntry]) -> None:
        # As safetensors does: the widest numbers first, so that each tensor is aligned.
        names = sorted(entries, key=lambda name: (-_itemsize(entries[name]), name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end, self._left = 0, {}
        for name in names:
            entry, begin = entries[name], end
            end += entry.nbytes
            header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
            self._left[name] = (begin, entry.nbytes)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._body = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._body + end)

    def write(self, name: str, tensor: Tensor) -> None:
        begin, size = self._left.pop(name)
        tensor = tensor.contiguous()
        assert tensor.nbytes == size, f"{name} has {tensor.nbytes} bytes and was announced with {size}"
        self._file.seek(self._body + begin)
        if size:
            self._file.write((ctypes.c_char * size).from_address(tensor.data_ptr()))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close()
        assert kind is not None or not self._left, f"not written: {sorted(self._left)}"


def _itemsize(entry: TensorEntry) -> int:
    return entry.nbytes // max(1, prod(entry.shape))


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its name when the block ends, or goes when it fails.

    Raises CheckpointError if `target` exists and is not empty, or cannot be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists; choose another folder for the result, or remove it")
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
        folder = temporary / target.name  # made here: mkdtemp's own folder is closed to other users
        folder.mkdir()
        yield folder
        if target.exists():
            target.rmdir()
        os.replace(folder, target)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)

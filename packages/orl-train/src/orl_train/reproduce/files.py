"""Files that are whole or absent, also when several processes write them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orl_train import checkpoint


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place to write beside `path`, renamed to it at the end; nothing is left of it after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes JSON, all or nothing."""
    with replacing(path) as temporary:
        checkpoint.write_json(temporary, value)

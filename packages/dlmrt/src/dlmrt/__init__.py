"""Single-request inference engine for diffusion language models."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlmrt.engine import Engine
    from dlmrt.params import GenerationParams
    from dlmrt.result import BlockCommitted, Draft, Finished, GenerationResult

__all__ = ["BlockCommitted", "Draft", "Engine", "Finished", "GenerationParams", "GenerationResult"]
__version__ = version("dlmrt")

_HOMES = {"Engine": "engine", "GenerationParams": "params"}


def __getattr__(name: str) -> Any:
    # Imported on first use: `dlmrt --help` should not wait for torch.
    if name not in __all__:
        raise AttributeError(f"module 'dlmrt' has no attribute {name!r}")
    return getattr(import_module(f"dlmrt.{_HOMES.get(name, 'result')}"), name)

"""Pure tensor math of on-policy residual learning and block diffusion.

Public names are imported on first use, so that a command line which only needs the errors does not wait for torch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orl_core.decoders import CanvasState, Decoder, DraftEdit, EntropyBound, Threshold
    from orl_core.entropy import TokenStats, sample_gumbel, token_stats
    from orl_core.errors import ConfigError, DataError, OrlError, ShapeError
    from orl_core.nvfp4 import Nvfp4Tensor
    from orl_core.protocols import Denoiser, RolloutEngine, Verifier
    from orl_core.residual import ResidualAdapter
    from orl_core.rng import CounterRng, DrawSource, Stream
    from orl_core.trajectory import BlockTrace, Trajectory
    from orl_core.visibility import Visibility

__version__ = version("orl-core")

_HOME = {
    "orl_core.decoders": (
        "CanvasState",
        "Decoder",
        "DraftEdit",
        "EntropyBound",
        "Threshold",
    ),
    "orl_core.entropy": (
        "TokenStats",
        "sample_gumbel",
        "token_stats",
    ),
    "orl_core.errors": (
        "ConfigError",
        "DataError",
        "OrlError",
        "ShapeError",
    ),
    "orl_core.nvfp4": ("Nvfp4Tensor",),
    "orl_core.protocols": (
        "Denoiser",
        "RolloutEngine",
        "Verifier",
    ),
    "orl_core.residual": ("ResidualAdapter",),
    "orl_core.rng": (
        "CounterRng",
        "DrawSource",
        "Stream",
    ),
    "orl_core.trajectory": (
        "BlockTrace",
        "Trajectory",
    ),
    "orl_core.visibility": ("Visibility",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'orl_core' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


__all__ = [
    "BlockTrace",
    "CanvasState",
    "ConfigError",
    "CounterRng",
    "DataError",
    "Decoder",
    "Denoiser",
    "DraftEdit",
    "DrawSource",
    "EntropyBound",
    "Nvfp4Tensor",
    "OrlError",
    "ResidualAdapter",
    "RolloutEngine",
    "ShapeError",
    "Stream",
    "Threshold",
    "TokenStats",
    "Trajectory",
    "Verifier",
    "Visibility",
    "__version__",
    "sample_gumbel",
    "token_stats",
]

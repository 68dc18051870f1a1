"""Pure tensor math of on-policy residual learning and block diffusion."""

from importlib.metadata import version

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

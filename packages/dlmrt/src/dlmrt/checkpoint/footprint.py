"""Memory that a model takes on each device, computed from its configuration alone.

The plan of a device: attention heads, MLP width, experts and vocabulary are split evenly over the ranks, key/value
heads until each rank has one of its own; norms, routers and residual adapters are replicated. NVFP4 holds the
attention, MLP and expert projections (half a byte a value, one byte per 16 values, four bytes a matrix); all else keeps
the dtype.
"""

import re
from dataclasses import dataclass
from math import prod

import torch

from dlmrt.loop.decode import cache_capacity
from dlmrt.models.base import ModelConfig

RANKS = (1, 2, 4, 8)
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_KEY_VALUE = re.compile(r"\.self_attn\.[kv]_proj\.weight$")
_FUSED_QKV = re.compile(r"\.attention\.query_key_value\.weight$")
_PROJECTION = re.compile(r"\.layers\..*(_proj\.weight|_proj|\.attention\.(query_key_value|dense)\.weight)$")
_VOCABULARY = re.compile(r"(embed_tokens|word_embeddings|lm_head)\.weight$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes on each of `ranks` devices. kv_cache_bytes: one request that fills the context."""

    ranks: int
    nvfp4: bool
    weight_bytes: int
    kv_cache_bytes: int


def parameter_counts(config: ModelConfig) -> tuple[int, int]:
    """(all parameters, those that the forward of one token uses); tied weights count once."""
    sizes = {name: prod(shape) for name, shape in config.tensor_shapes().items()}
    return sum(sizes.values()), round(sum(size * config.active_share(name) for name, size in sizes.items()))


def footprint(
    config: ModelConfig, *, context: int, dtype: torch.dtype, ranks: int = 1, nvfp4: bool = False
) -> Footprint:
    """context: tokens of prompt and answer together. dtype: of whatever is not NVFP4, and of the KV cache."""
    spec = config.spec
    weights = 0.0
    for name, shape in config.tensor_shapes().items():
        matrices = prod(shape[:-2])
        size = _nvfp4_bytes(shape, matrices) if nvfp4 and is_projection(name) else prod(shape) * dtype.itemsize
        weights += size * _share(config, name, shape, ranks)
    positions = cache_capacity(spec, 1, context - 1)
    per_position = sum(-(-heads // ranks) * width for heads, width in spec.kv_layers)
    cache = 2 * positions * per_position * dtype.itemsize
    return Footprint(ranks=ranks, nvfp4=nvfp4, weight_bytes=round(weights), kv_cache_bytes=cache)


def is_projection(name: str) -> bool:
    """Whether a tensor holds attention, MLP or expert projections of a layer: what NVFP4 checkpoints quantise."""
    return _PROJECTION.search(name) is not None


def _nvfp4_bytes(shape: tuple[int, ...], matrices: int) -> float:
    return prod(shape) * (1 / 2 + 1 / 16) + 4 * matrices


def _share(config: ModelConfig, name: str, shape: tuple[int, ...], ranks: int) -> float:
    """What part of a tensor each rank holds."""
    layer = _LAYER.search(name)
    if layer is None:
        return 1 / ranks if _VOCABULARY.search(name) else 1.0
    kv_heads, width = config.spec.kv_layers[int(layer[1])]
    if _KEY_VALUE.search(name):
        return 1 / min(ranks, kv_heads)
    if _FUSED_QKV.search(name):
        kv_rows = 2 * kv_heads * width / shape[0]
        return (1 - kv_rows) / ranks + kv_rows / min(ranks, kv_heads)
    return 1 / ranks if is_projection(name) else 1.0

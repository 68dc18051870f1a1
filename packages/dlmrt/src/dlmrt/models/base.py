"""What the engine asks of a model family.

A model is a plain object over a dictionary of tensors (no nn.Module tree): it can be built on the tensors of a
checkpoint, or on those of a trainer's model without copying them. Shape legend: B rows, T tokens, C canvas, V
vocabulary, d width.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from dlmrt.cache import KVCache, Span
from orl_core.noise import Family

Layout = Literal["prompt_end", "aligned"]
Commit = Literal["causal", "block_causal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """What the denoising loop must know about a model.

    canvas_length     tokens of a block
    max_context       positions that prompt and answer may take together
    family            noise of an unresolved position: uniformly random tokens, or the mask token
    mask_token_id     the mask token (masked family); it is never predicted
    layout            where blocks lie: "prompt_end" lays them from the end of the prompt; "aligned" at absolute
                      multiples of canvas_length, so that the prompt's tail is a fixed part of the first block
    commit            what a committed token sees: what precedes it ("causal"), or its whole block ("block_causal")
    has_residual      the model takes a residual context z
    kv_layers         (key/value heads, head width) of each layer
    delete_token_id, insert_token_id   control tokens of InsertDelete, if the checkpoint declares them
    """

    vocab_size: int
    hidden_size: int
    canvas_length: int
    max_context: int
    family: Family
    mask_token_id: int | None
    layout: Layout
    commit: Commit
    has_residual: bool
    kv_layers: tuple[tuple[int, int], ...]
    delete_token_id: int | None = None
    insert_token_id: int | None = None

    def kv_bytes(self, positions: int, dtype: torch.dtype) -> int:
        """Bytes of the KV cache of one row over `positions` positions."""
        return 2 * positions * dtype.itemsize * sum(heads * width for heads, width in self.kv_layers)


class ModelConfig(ABC):
    """A family's config.json, parsed into a frozen dataclass."""

    @classmethod
    @abstractmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Raises ModelConfigError that names the key if a value is missing or cannot be honoured."""

    @property
    @abstractmethod
    def spec(self) -> BlockSpec: ...

    @abstractmethod
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint must hold."""

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although the model does not use it."""
        return False

    def active_share(self, name: str) -> float:
        """What part of this tensor's parameters the forward of one token uses: less than 1 for routed experts."""
        return 1.0

    def decoder_defaults(self, generation: Mapping[str, Any]) -> Mapping[str, Any]:
        """The decoder object {"name": ..., settings} of a generation_config.json, or the family's own default."""
        default = {"name": "entropy_bound" if self.spec.family == "uniform" else "threshold"}
        return generation.get("decoder") or default


class BlockModel(ABC):
    """A block-diffusion denoiser over a KV cache.

    spec             see BlockSpec
    embedding        [V, d]; z = p @ embedding * embedding_scale
    head             [V, d]; logits = hidden @ head^T, then softcap * tanh(logits / softcap) if `softcap` is set
    """

    config_class: ClassVar[type[ModelConfig]]

    spec: BlockSpec
    embedding: Tensor
    embedding_scale: float = 1.0
    head: Tensor
    softcap: float | None = None

    @classmethod
    @abstractmethod
    def from_tensors(cls, config: Any, tensors: Mapping[str, Tensor], *, fuse: bool = True) -> Self:
        """The model over tensors named and shaped as in `config.tensor_shapes()`.

        fuse: True concatenates projections that read the same input, which copies them and is faster; False shares
        every tensor with the caller, so that an in-place update of them is an update of the model.
        """

    @abstractmethod
    def encode(self, ids_BT: Tensor, span: Span, cache: KVCache) -> None:
        """Writes the keys and values of clean tokens (prompt, finished blocks) to the cache."""

    @abstractmethod
    def denoise(
        self, ids_BC: Tensor, z_BCd: Tensor | None, receives_BC: Tensor | None, span: Span, cache: KVCache
    ) -> Tensor:
        """Normalised hidden states [B, C, d] of which `head` makes logits, after [context KV | canvas KV].

        z_BCd: residual context, taken by the positions where `receives_BC` is True; None for no residual at all.
        The canvas' keys are written to its span of the cache, where the next step or the commit overwrites them.
        """

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(self.spec.kv_layers, batch, capacity, self.dtype, self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [..., V] of hidden states [..., d]."""
        logits = torch.nn.functional.linear(hidden, self.head).float()
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

"""What Qwen3 and LLaDA2 share: pre-norm decoder layers over one rotary table, with the residual adapter of ORL.

Shape legend: B rows, T tokens, C canvas, d width.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from torch import Tensor
from torch.nn import functional as F

from dlmrt.cache import KVCache, Span
from dlmrt.models.base import BlockModel
from dlmrt.models.layers import RotaryTable, residual_adapter, rms_norm
from orl_core.residual import add_residual


class AdapterModel(BlockModel):
    """See `BlockModel`.

    embedding_name: of the tensor that embeds tokens. layer_class: makes a layer from (config, tensors, index, fuse).
    """

    embedding_name: ClassVar[str]
    layer_class: ClassVar[Callable[..., Any]]

    def __init__(self, config: Any, tensors: Mapping[str, Tensor], *, fuse: bool) -> None:
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.config, self.spec = config, config.spec
        self.embedding = tensors[self.embedding_name]
        self.head = self.embedding if config.tie_word_embeddings else tensors["lm_head.weight"]
        self.norm = tensors["model.norm.weight"]
        make_layer = type(self).layer_class
        self.layers = [make_layer(config, tensors, index, fuse) for index in range(config.num_hidden_layers)]
        self.rotary = RotaryTable.default(config.rope_theta, config.rotary_width, self.dtype, self.device)
        self.adapter = residual_adapter(tensors, config.rms_norm_eps)

    @classmethod
    def from_tensors(cls, config: Any, tensors: Mapping[str, Tensor], *, fuse: bool = True) -> Self:
        return cls(config, tensors, fuse=fuse)

    def encode(self, ids_BT: Tensor, span: Span, cache: KVCache) -> None:
        x_BTd, rotary = F.embedding(ids_BT, self.embedding), self.rotary.at(span)
        for layer in self.layers[:-1]:
            x_BTd = layer(x_BTd, rotary, span, cache)
        self.layers[-1].write_keys(x_BTd, rotary, span, cache)  # nothing reads the last layer's output

    def denoise(
        self, ids_BC: Tensor, z_BCd: Tensor | None, receives_BC: Tensor | None, span: Span, cache: KVCache
    ) -> Tensor:
        x_BCd, rotary = F.embedding(ids_BC, self.embedding), self.rotary.at(span)
        if self.adapter is not None and z_BCd is not None and receives_BC is not None:
            x_BCd = add_residual(x_BCd, self.adapter(z_BCd), receives_BC)
        for layer in self.layers:
            x_BCd = layer(x_BCd, rotary, span, cache)
        return rms_norm(x_BCd, self.norm, self.config.rms_norm_eps)

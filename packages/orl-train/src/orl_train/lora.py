"""LoRA (peft) for large models: low-rank updates of the body's linear layers; the residual adapter is trained whole.

A layer's weight becomes W + (alpha / rank) B A (Hu et al., 2021, arXiv 2106.09685). Needs the extra orl-train[lora].
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from orl_core.errors import ConfigError, require_at_least
from orl_train.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion
from orl_train.optim import RESIDUAL_PREFIXES

_NAME = "default"
_BASE = ".base_layer."
_LAYERS = (
    r"model\.(decoder\.)?layers\.\d+\..*(q_proj|k_proj|v_proj|o_proj|query_key_value|dense|gate_proj|up_proj|down_proj)"
)


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """rank of the updates; alpha: their scale is alpha / rank."""

    rank: int = 16
    alpha: float = 32.0

    def __post_init__(self) -> None:
        require_at_least("lora.rank", self.rank, 1)
        if not self.alpha > 0:
            raise ConfigError(f"lora.alpha is {self.alpha}; it must be greater than 0")


def add_lora(model: nn.Module, settings: LoraSettings) -> None:
    """Gives the linear layers of the model's body low-rank updates, in place; they start at zero.

    Trainable are then the updates and the residual adapter, nothing else. The model stays of its class; its state has
    other names, which `merged_state` undoes. Raises ConfigError if peft is not installed or no layer is found.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError as error:
        raise ConfigError("peft is not installed; install orl-train[lora], or train without LoRA") from error
    alpha: Any = settings.alpha  # peft declares an integer and takes any number
    config = LoraConfig(r=settings.rank, lora_alpha=alpha, target_modules=_LAYERS)
    try:
        inject_adapter_in_model(config, model, _NAME)
    except ValueError as error:
        raise ConfigError(f"{type(model).__name__} has no linear layers that LoRA could update: {error}") from error
    if isinstance(model, DiffusionGemmaForBlockDiffusion):
        model.share_layers()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(RESIDUAL_PREFIXES) or _is_update(name))


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """What training changes of a model with LoRA, under the names of its parameters: all that a checkpoint needs
    beside the start model."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def load_trained_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies what `trained_state` gave, whole tensors, into the model. Raises KeyError if a tensor is missing."""
    for name, parameter in trained_state(model).items():
        copy_whole(state[name], parameter)


def copy_whole(source: Tensor, target: Tensor) -> None:
    """Copies a whole tensor, the same on every rank, into a tensor or into this rank's shard of it."""
    source = source.to(target.device, target.dtype)
    if isinstance(target, DTensor):
        source = distribute_tensor(source, target.device_mesh, target.placements)
    target.copy_(source)


def has_lora(model: nn.Module) -> bool:
    return any(_is_update(name) for name, _ in model.named_parameters())


def merged_state(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The state of a model with LoRA under the names of the model without it, the updates added to the weights.

    state: the model's state dict if its tensors come from elsewhere (gathered from shards). Other tensors are shared.
    """
    state = model.state_dict() if state is None else state
    scale = {name: layer.scaling[_NAME] for name, layer in _updated_layers(model).items()}
    merged: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if _is_update(name):
            continue
        layer, _, kind = name.partition(_BASE)
        if kind == "weight":
            low, high = (state[f"{layer}.lora_{part}.{_NAME}.weight"] for part in "AB")
            tensor = tensor + scale[layer] * (high @ low).to(tensor.dtype)
        merged[name.replace(_BASE, ".")] = tensor.detach()
    return merged


class StartModel:
    """The model as it was before the training of a LoRA run, without a second copy of its body: the frozen reference.

    Made after `add_lora` and before the first update. Called like the model.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._place = _residual_place(model)
        self._adapter: Any = copy.deepcopy(getattr(*self._place)).requires_grad_(False) if self._place else None

    def to(self, device: torch.device) -> "StartModel":
        """Moves what it holds of its own; returns itself."""
        if self._adapter is not None:
            self._adapter.to(device)
        return self

    def __call__(self, **inputs: Any) -> Tensor:
        layers = _updated_layers(self.model).values()
        trained = getattr(*self._place) if self._place else None
        self._put(self._adapter)
        for layer in layers:
            layer.enable_adapters(False)
        try:
            return self.model(**inputs)
        finally:
            for layer in layers:
                layer.enable_adapters(True)
            self._put(trained)

    def _put(self, adapter: Any) -> None:
        if self._place:
            setattr(*self._place, adapter)


def _residual_place(model: nn.Module) -> tuple[nn.Module, str] | None:
    """The module that holds the residual pathway, and its name there; None for a model without one."""
    for prefix in RESIDUAL_PREFIXES:
        owner, _, name = prefix.removesuffix(".").rpartition(".")
        try:
            place = model.get_submodule(owner)
        except AttributeError:
            continue
        if getattr(place, name, None) is not None:
            return place, name
    return None


def _is_update(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _updated_layers(model: nn.Module) -> dict[str, Any]:
    """peft's layers by name."""
    return {name: module for name, module in model.named_modules(remove_duplicate=False) if hasattr(module, "lora_A")}

"""Training over several ranks: gradients that add up, packs that meet in each step, whole weights of a sharded model.

The losses of an update are normalised by the whole update, so the ranks' gradients are summed and never averaged.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from orl_core.balance import CostModel, micro_batches
from orl_core.errors import ConfigError
from orl_core.noise import Family
from orl_core.packing import PackedReplay, ReplayUnit, empty_pack
from orl_train.lora import copy_whole, has_lora, merged_state
from orl_train.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion
from orl_train.replay import pack_context


def sharding_asked(accelerator: Accelerator) -> bool:
    """Whether the accelerate configuration asks for FSDP2."""
    return accelerator.is_fsdp2


def shard(accelerator: Accelerator, model: Any) -> None:
    """Divides the model over the ranks, in place, as the accelerate configuration says; gradients are summed.

    Raises ConfigError for DiffusionGemma, whose encoder and decoder share weights across FSDP's units.
    """
    if isinstance(model, DiffusionGemmaForBlockDiffusion):
        raise ConfigError("diffusion_gemma cannot be sharded by FSDP2; train it on one device, or with LoRA")
    model.to(accelerator.device)
    fsdp2_prepare_model(accelerator, model)
    plugin: Any = accelerator.state.fsdp_plugin
    if plugin.activation_checkpointing:
        model.activation_checkpointing_enable()
    sum_sharded_gradients(model)


def whole(tensor: Tensor) -> Tensor:
    """The tensor, its shards gathered; every rank must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 holds the model's parameters in shards."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def sum_sharded_gradients(model: nn.Module) -> None:
    """Makes FSDP2 add the ranks' gradients up, in every backward from now on, instead of averaging them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def add_up_gradients(model: nn.Module) -> None:
    """Sums the gradients of the parameters that every rank holds whole; a rank without gradients adds zeros.

    Of a sharded model that is the residual adapter: FSDP2 takes no scalar parameter such as its alpha.
    """
    parameters = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if not parameters:
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    dist.all_reduce(flat)
    for parameter, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = grad.view_as(parameter)


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scales the gradients down to a norm of at most `max_norm`, sharded ones included; returns the norm before.

    torch's own takes no mixture of sharded and whole gradients. The shards are those of one group of all ranks.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    shards = [g.to_local() for g in gradients if isinstance(g, DTensor)]
    wholes = [g for g in gradients if not isinstance(g, DTensor)]
    squares = sum((g.square().sum() for g in wholes), torch.zeros((), device=gradients[0].device))
    if shards:
        sharded = torch.stack([g.square().sum() for g in shards]).sum()
        dist.all_reduce(sharded)
        squares += sharded
    norm = squares.sqrt()
    for gradient in shards + wholes:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return float(norm)


def rank_packs(
    units: Sequence[ReplayUnit],
    costs: CostModel,
    family: Family,
    token_budget: int,
    *,
    rank: int,
    world: int,
    width: int,
    context_blocks: int | None = None,
) -> list[PackedReplay]:
    """This rank's packs of at most `token_budget` tokens; every rank has as many, of nearly equal cost in each step.

    Under FSDP2 the ranks run every forward together, so one without work gets packs of padding. width: of z.
    context_blocks: see `orl_train.replay.pack_context`.
    """
    loads = [costs.cost(tokens=u.tokens, pairs=u.visible_pairs, rows=u.rows) for u in units]
    steps = micro_batches(loads, [u.tokens for u in units], ranks=world, capacity=token_budget)[rank]
    return [
        pack_context([units[i] for i in members], family, context_blocks) if members else empty_pack(width)
        for members in steps
    ]


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state under its checkpoint names, shards gathered and LoRA added in; every rank must call it.

    Tensors that are neither are the model's own, so that an engine over them sees every update in place.
    """
    state = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    return merged_state(model, state) if has_lora(model) else state


@torch.no_grad()
def load_whole_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies whole tensors, the same on every rank, into the model's own ones or into this rank's shards of them.

    Raises KeyError if `state` lacks one that is not tied to another.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, target in model.state_dict().items():
        if name in state or name not in tied:
            copy_whole(state[name], target)

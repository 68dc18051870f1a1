"""Training over several ranks: gradients that add up, packs that meet in each step, whole weights of a sharded model.

The losses of an update are normalised by the whole update, so the ranks' gradients are summed and never averaged.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from orl_core.balance import CostModel, micro_batches
from orl_core.noise import Family
from orl_core.packing import PackedReplay, ReplayUnit, empty_pack, pack
from orl_train.lora import has_lora, merged_state


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
) -> list[PackedReplay]:
    """This rank's packs of at most `token_budget` tokens; every rank has as many, of nearly equal cost in each step.

    Under FSDP2 the ranks run every forward together, so one without work gets packs of padding. width: of z.
    """
    loads = [costs.cost(tokens=u.tokens, pairs=u.visible_pairs, rows=u.rows) for u in units]
    steps = micro_batches(loads, [u.tokens for u in units], ranks=world, capacity=token_budget)[rank]
    return [pack([units[i] for i in members], family) if members else empty_pack(width) for members in steps]


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state under its checkpoint names, shards gathered and LoRA added in; every rank must call it.

    Tensors that are neither are the model's own, so that an engine over them sees every update in place.
    """
    state = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    return merged_state(model, state) if has_lora(model) else state


@torch.no_grad()
def load_whole_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies whole tensors, the same on every rank, into the model's own ones or into this rank's shards of them."""
    for name, target in model.state_dict().items():
        source = state[name].to(target.dtype)
        if isinstance(target, DTensor):
            source = distribute_tensor(source.to(target.device), target.device_mesh, target.placements)
        target.copy_(source)

"""Replay without packing: one padded forward for each state, under a dense mask, with its own copy of the context.

The losses and gradients are those of the packed replay; this is what its speed is measured against.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from orl_core.losses import OrlLossConfig, ReplayTargets, orl_losses
from orl_core.noise import Family
from orl_core.packing import PackedReplay, ReplayUnit, pack
from orl_core.selection import StateRun
from orl_train.attention import attention_plan
from orl_train.replay import ReplaySums, replay_logits


def state_length(units: Sequence[ReplayUnit]) -> int:
    """Tokens of the longest state with its context."""
    blocks = [unit.trajectory.blocks[run.block] for unit in units for run in unit.runs]
    return max(block.start + block.canvas.shape[-1] for block in blocks)


def padded_backward(
    model: Any,
    reference: Any | None,
    units: Sequence[ReplayUnit],
    family: Family,
    config: OrlLossConfig,
    *,
    responses: int,
    residual: bool,
    length: int,
) -> ReplaySums:
    """Adds the gradients of the units' losses to the model's parameters; see orl_train.replay.replay_backward.

    length: tokens to which every state is padded. Of the sums only losses and tokens are counted.
    """
    sums = ReplaySums()
    for unit in units:
        for run in unit.runs:
            _run_backward(model, reference, unit, run, family, config, responses, residual, length, sums)
    return sums


def _run_backward(
    model: Any,
    reference: Any | None,
    unit: ReplayUnit,
    run: StateRun,
    family: Family,
    config: OrlLossConfig,
    responses: int,
    residual: bool,
    length: int,
    sums: ReplaySums,
) -> None:
    """Each state's backward follows its forward; the state before stays as the source of the entropy contraction."""
    source: tuple[ReplayTargets, torch.Tensor, torch.Tensor | None] | None = None
    for step in range(run.first, run.first + run.length):
        state = replace(unit, runs=(StateRun(run.block, step, 1),))
        packed = pack([state], family).padded(length)
        plan = attention_plan(packed.visibility, batch=1, device=packed.ids.device, backend="reference")
        expected = None
        if config.kl_weight > 0 and reference is not None:
            with torch.no_grad():
                expected = replay_logits(reference, packed, plan, residual)
        logits = replay_logits(model, packed, plan, residual)
        following = (packed.targets, logits.detach(), expected)
        if source is None:
            losses = orl_losses(logits, packed.targets, config, responses=responses, reference_logits_NV=expected)
        else:
            losses = orl_losses(
                torch.cat([source[1], logits]),
                _after(source[0], packed, 1 / max(1, unit.response_pairs)),
                config,
                responses=responses,
                reference_logits_NV=None if source[2] is None or expected is None else torch.cat([source[2], expected]),
            )
        losses.total.backward()
        source = following
        for name in ("total", "prediction", "kl", "aec"):
            setattr(sums, name, getattr(sums, name) + getattr(losses, name).item())
        sums.tokens += length


def _after(source: ReplayTargets, state: PackedReplay, pair_weight: float) -> ReplayTargets:
    """Targets of [source state | state]: the source has no weight of its own and is only the pair's first member."""
    own = state.targets
    return ReplayTargets(
        target=torch.cat([source.target, own.target]),
        unresolved=torch.cat([source.unresolved, own.unresolved]),
        rollout_entropy=torch.cat([source.rollout_entropy, own.rollout_entropy]),
        state=torch.cat([source.state, own.state + 1]),
        state_weight=torch.cat([torch.zeros_like(source.state_weight), own.state_weight]),
        pair=torch.tensor([[0, 1]]),
        pair_weight=torch.tensor([pair_weight]),
    )

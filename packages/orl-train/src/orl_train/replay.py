"""Replay of captured states under the training model: packs in, losses and gradients out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from orl_core.balance import CostModel, balanced_partition, first_fit_decreasing
from orl_core.errors import ConfigError
from orl_core.losses import OrlLossConfig, orl_losses
from orl_core.noise import Family
from orl_core.packing import PackedReplay, ReplayUnit, pack, split_units
from orl_core.selection import select_states
from orl_core.trajectory import Trajectory
from orl_train.attention import AttentionPlan, attention_plan


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Which states are replayed and how they are packed.

    states_per_response: budget of states a response (adjacent pairs count two). token_budget: tokens of one pack.
    first_probability: chance that a block's first state is preferred.
    """

    states_per_response: int = 2
    token_budget: int = 2048
    first_probability: float = 0.25

    def __post_init__(self) -> None:
        if self.states_per_response < 1:
            raise ConfigError(f"states_per_response is {self.states_per_response}; it must be at least 1")


def cost_model(config: Any) -> CostModel:
    """The cost of packed tokens on a model of this configuration, all of whose layers are taken to be as its first."""
    text = config.get_text_config()
    layer = text.per_layer_config[0]
    return CostModel.of_transformer(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim,
        intermediate=text.intermediate_size,
        vocab_size=text.vocab_size,
    )


def select_units(
    trajectories: Sequence[Trajectory], samples: Sequence[int], settings: ReplaySettings, seed: int
) -> list[ReplayUnit]:
    """The replay units of verified trajectories; `samples[i]` numbers trajectory i in the whole run."""
    units: list[ReplayUnit] = []
    for trajectory, sample in zip(trajectories, samples, strict=True):
        runs = select_states(
            trajectory,
            settings.states_per_response,
            seed=seed,
            sample=sample,
            first_probability=settings.first_probability,
        )
        units += split_units(trajectory, runs, settings.token_budget)
    return units


def rank_share(units: Sequence[ReplayUnit], costs: CostModel, rank: int, world: int) -> list[ReplayUnit]:
    """This rank's units under a division of nearly equal cost; every rank computes the same division."""
    loads = [costs.cost(tokens=u.tokens, pairs=u.visible_pairs, rows=u.rows) for u in units]
    return [units[i] for i in balanced_partition(loads, world)[rank]]


def make_packs(
    units: Sequence[ReplayUnit], family: Family, token_budget: int, context_blocks: int | None = None
) -> list[PackedReplay]:
    """Packs of at most `token_budget` tokens. context_blocks: see `pack_context`."""
    bins = first_fit_decreasing([unit.tokens for unit in units], token_budget)
    return [pack_context([units[i] for i in members], family, context_blocks) for members in bins]


def pack_context(units: Sequence[ReplayUnit], family: Family, context_blocks: int | None) -> PackedReplay:
    """One pack. context_blocks: length of the blocks, laid from position 0, in which clean tokens see one another
    (LLaDA2, whose states start at multiples of it); None for a token-causal context."""
    packed = pack(units, family)
    if context_blocks is None:
        return packed
    seen = packed.visibility
    blocks = (seen.position // context_blocks + 1) * context_blocks
    return replace(packed, visibility=replace(seen, limit=torch.where(seen.state == 0, blocks, seen.limit)))


def replay_logits(model: Any, packed: PackedReplay, plan: AttentionPlan, residual: bool) -> Tensor:
    """Logits [N, V] of the pack's state tokens under `model`."""
    z, receives = (packed.z[None], packed.receives[None]) if residual else (None, None)
    return model(
        input_ids=packed.ids[None],
        position_ids=packed.visibility.position[None],
        attention_mask=plan,
        z=z,
        receives=receives,
        rows=packed.rows,
    )


@dataclass(slots=True)
class ReplaySums:
    """Losses of an update, summed over packs; plain numbers."""

    total: float = 0.0
    prediction: float = 0.0
    kl: float = 0.0
    aec: float = 0.0
    uncertain: int = 0
    anchored: int = 0
    tokens: int = 0


def replay_backward(
    model: Any,
    reference: Any | None,
    packs: Sequence[PackedReplay],
    config: OrlLossConfig,
    *,
    responses: int,
    residual: bool,
    backward: Any = None,
) -> ReplaySums:
    """Adds the gradients of the packs' losses to the model's parameters.

    reference: the frozen start model, needed if config.kl_weight > 0; replays the same states, residual context
    included. responses: responses of the whole update over all ranks. backward: called with each pack's loss (default:
    `loss.backward()`).
    """
    sums = ReplaySums()
    device = next(model.parameters()).device
    for packed in packs:
        packed = packed.to(device)
        plan = attention_plan(packed.visibility, batch=1, device=device)
        reference_logits = None
        if config.kl_weight > 0 and reference is not None:
            with torch.no_grad():
                reference_logits = replay_logits(reference, packed, plan, residual)
        logits = replay_logits(model, packed, plan, residual)
        losses = orl_losses(logits, packed.targets, config, responses=responses, reference_logits_NV=reference_logits)
        (backward or Tensor.backward)(losses.total)
        for name in ("total", "prediction", "kl", "aec", "uncertain", "anchored"):
            setattr(sums, name, getattr(sums, name) + getattr(losses, name).item())
        sums.tokens += len(packed.ids)
    return sums

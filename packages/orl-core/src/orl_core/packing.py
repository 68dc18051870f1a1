"""Packs replayed states into one sequence: [clean context | states] of one response after the other.

The clean context is laid down once per unit and ends where the last of its states' blocks starts; every state follows
as a canvas of its own. Shape legend: T packed tokens, d width, N rows (state tokens), S states, P adjacent pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from orl_core.errors import ConfigError, ShapeError, require_at_least
from orl_core.losses import ReplayTargets
from orl_core.noise import Family
from orl_core.residual import residual_receivers
from orl_core.selection import StateRun
from orl_core.trajectory import BlockTrace, Trajectory
from orl_core.visibility import PADDING_SEGMENT, Visibility, block_start


@dataclass(frozen=True, slots=True)
class ReplayUnit:
    """Some selected states of one response with their clean context: what is packed and balanced as a whole.

    response_states, response_pairs: numbers selected of the whole response, over all of its units.
    """

    trajectory: Trajectory
    runs: tuple[StateRun, ...]
    response_states: int
    response_pairs: int

    @property
    def context(self) -> int:
        """Clean tokens needed."""
        return max(self._block(run).start for run in self.runs)

    @property
    def rows(self) -> int:
        """State tokens."""
        return sum(run.length * self._block(run).canvas.shape[-1] for run in self.runs)

    @property
    def tokens(self) -> int:
        return self.context + self.rows

    @property
    def visible_pairs(self) -> int:
        """Visible (query, key) pairs under a token-causal context: the attention work."""
        pairs = self.context * (self.context + 1) // 2
        for run in self.runs:
            block = self._block(run)
            length = block.canvas.shape[-1]
            pairs += run.length * length * (block.start + length)
        return pairs

    def _block(self, run: StateRun) -> BlockTrace:
        return self.trajectory.blocks[run.block]


@dataclass(frozen=True, slots=True)
class PackedReplay:
    """One packed sequence.

    ids        int64 [T]
    visibility attributes [T]; `visibility.position` holds the position ids; state numbers are unique in the pack
    z          float [T, d]  captured residual context, zero on clean tokens
    receives   bool [T]      where the residual is added
    rows       int64 [N]     indices of the state tokens, states in order: logits[rows] are the losses' rows
    targets    what the rows are trained towards
    """

    ids: Tensor
    visibility: Visibility
    z: Tensor
    receives: Tensor
    rows: Tensor
    targets: ReplayTargets

    def to(self, device: torch.device) -> "PackedReplay":
        attributes = self.visibility
        return PackedReplay(
            self.ids.to(device),
            Visibility(*(getattr(attributes, a).to(device) for a in ("segment", "position", "state", "limit"))),
            self.z.to(device),
            self.receives.to(device),
            self.rows.to(device),
            self.targets.to(device),
        )

    def padded(self, length: int, pad_id: int = 0) -> "PackedReplay":
        """The same with padding tokens up to `length`; padding sees itself only and has no rows."""
        extra = length - len(self.ids)
        if extra < 0:
            raise ShapeError(f"the pack has {len(self.ids)} tokens; it cannot be padded to {length}")

        def grow(x: Tensor, value: int) -> Tensor:
            return torch.cat([x, x.new_full((extra, *x.shape[1:]), value)])

        seen = self.visibility
        visibility = Visibility(
            grow(seen.segment, PADDING_SEGMENT), grow(seen.position, 0), grow(seen.state, 0), grow(seen.limit, 0)
        )
        return replace(
            self,
            ids=grow(self.ids, pad_id),
            visibility=visibility,
            z=grow(self.z, 0),
            receives=grow(self.receives, 0),
        )


def split_units(trajectory: Trajectory, runs: Sequence[StateRun], token_budget: int) -> list[ReplayUnit]:
    """Units of at most `token_budget` tokens each that together replay `runs`; a run is never divided.

    Raises ConfigError when one run with its context does not fit.
    """
    require_at_least("token_budget", token_budget, 1)
    states, pairs = sum(run.length for run in runs), sum(run.pairs for run in runs)
    units: list[ReplayUnit] = []
    for run in sorted(runs):
        alone = ReplayUnit(trajectory, (run,), states, pairs)
        if alone.tokens > token_budget:
            raise ConfigError(
                f"{run.length} adjacent states with a context of {alone.context} take {alone.tokens} tokens; raise the "
                f"token budget (now {token_budget}) to that, or select fewer states per response"
            )
        joined = replace(units[-1], runs=(*units[-1].runs, run)) if units else alone
        if units and joined.tokens <= token_budget:
            units[-1] = joined
        else:
            units.append(alone)
    return units


def pack(units: Sequence[ReplayUnit], family: Family, *, block_causal: bool = False) -> PackedReplay:
    """Packs the units in the given order. Raises ShapeError when there is none (`empty_pack` makes an empty one).

    block_causal: clean tokens see their whole block (LLaDA2) instead of being token-causal (QwenDLM).
    """
    if not units:
        raise ShapeError("pack needs at least one unit; use empty_pack(width) for a rank without work")
    columns: dict[str, list[Tensor]] = {name: [] for name in _COLUMNS}
    state_weight, pair, pair_weight = [], [], []
    for segment, unit in enumerate(units):
        _append_context(columns, unit, segment, block_causal)
        for run in unit.runs:
            block = unit.trajectory.blocks[run.block]
            pair += [(len(state_weight) + i, len(state_weight) + i + 1) for i in range(run.pairs)]
            pair_weight += [1 / max(1, unit.response_pairs)] * run.pairs
            for step in range(run.first, run.first + run.length):
                _append_state(columns, block, step, segment, len(state_weight) + 1, family)
                state_weight.append(1 / unit.response_states)
    column = {name: torch.cat(parts) for name, parts in columns.items()}
    rows = column["state"].nonzero().squeeze(-1)
    return PackedReplay(
        ids=column["ids"],
        visibility=Visibility(column["segment"], column["position"], column["state"], column["limit"]),
        z=column["z"],
        receives=column["receives"],
        rows=rows,
        targets=ReplayTargets(
            target=column["target"],
            unresolved=column["unresolved"],
            rollout_entropy=column["rollout_entropy"],
            state=column["state"][rows] - 1,
            state_weight=torch.tensor(state_weight),
            pair=torch.tensor(pair, dtype=torch.int64).reshape(-1, 2),
            pair_weight=torch.tensor(pair_weight),
        ),
    )


def empty_pack(width: int, *, length: int = 1, pad_id: int = 0, dtype: torch.dtype = torch.float32) -> PackedReplay:
    """A pack of padding alone, for a rank that has no work in a step which the others run together."""
    none = torch.zeros(0, dtype=torch.int64)
    no_state, false = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    targets = ReplayTargets(none, false, no_state, none, no_state, none.reshape(0, 2), no_state)
    visibility = Visibility(none, none, none, none)
    return PackedReplay(none, visibility, torch.zeros(0, width, dtype=dtype), false, none, targets).padded(
        length, pad_id
    )


_COLUMNS = ("ids", "segment", "position", "state", "limit", "z", "receives", "target", "unresolved", "rollout_entropy")


def _append_context(columns: dict[str, list[Tensor]], unit: ReplayUnit, segment: int, block_causal: bool) -> None:
    trajectory, length = unit.trajectory, unit.context
    ids = torch.cat([trajectory.prompt_ids, trajectory.response_ids])[:length]
    if len(ids) < length:
        raise ShapeError(f"a block starts at {length}, but prompt and response have only {len(ids)} tokens")
    position = torch.arange(length)
    limit = position + 1
    if block_causal:
        prompt, canvas = len(trajectory.prompt_ids), trajectory.blocks[unit.runs[0].block].canvas.shape[-1]
        limit = torch.where(position < prompt, prompt, block_start(position, prompt, canvas) + canvas).clamp(max=length)
    block = trajectory.blocks[unit.runs[0].block]
    values = {
        "ids": ids.cpu(),
        "segment": torch.full_like(position, segment),
        "position": position,
        "state": torch.zeros_like(position),
        "limit": limit,
        "z": torch.zeros(length, block.z.shape[-1], dtype=block.z.dtype),
        "receives": torch.zeros(length, dtype=torch.bool),
    }
    for name, value in values.items():
        columns[name].append(value)


def _append_state(
    columns: dict[str, list[Tensor]], block: BlockTrace, step: int, segment: int, state: int, family: Family
) -> None:
    canvas = block.canvas[step]
    position = block.start + torch.arange(len(canvas))
    unresolved = block.unresolved[step]
    values = {
        "ids": canvas,
        "segment": torch.full_like(position, segment),
        "position": position,
        "state": torch.full_like(position, state),
        "limit": torch.full_like(position, block.start),
        "z": block.z[step],
        "receives": residual_receivers(family, unresolved[None], torch.tensor([step > 0], device=canvas.device))[0],
        "target": block.tokens,
        "unresolved": unresolved,
        "rollout_entropy": block.entropy[step],
    }
    for name, value in values.items():
        columns[name].append(value.cpu())

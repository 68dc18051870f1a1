"""Which states of a response are replayed: adjacent pairs within a block, under a budget, seeded by sample."""

from dataclasses import dataclass
from random import Random

from orl_core.errors import require_at_least, require_range
from orl_core.trajectory import Trajectory


@dataclass(frozen=True, slots=True, order=True)
class StateRun:
    """Consecutive states first, first + 1, .. of one block; each two neighbours form an adjacent pair.

    block: index into Trajectory.blocks; first: the first step; length: number of states.
    """

    block: int
    first: int
    length: int

    @property
    def pairs(self) -> int:
        return self.length - 1


def select_states(
    trajectory: Trajectory,
    budget: int,
    *,
    seed: int,
    sample: int,
    first_probability: float = 0.25,
) -> list[StateRun]:
    """At most `budget` states of a trajectory, drawn as adjacent pairs; a block of one step offers that state alone.

    Candidates are tried in random order and kept while the union of their states fits the budget, so a budget that
    covers every state selects every state, and a budget of 1 a single state. With probability `first_probability` a
    block's first step (the one without residual context) is tried first.
    The draw depends on (seed, sample) only: not on rank, batch or order. Returns the runs in block order.
    """
    require_at_least("budget", budget, 1)
    require_range("first_probability", first_probability, 0.0, 1.0)
    random = Random(f"orl-select/{seed}/{sample}")
    width = min(2, budget)
    candidates = [
        (index, step, min(width, block.steps))
        for index, block in enumerate(trajectory.blocks)
        for step in range(max(1, block.steps - width + 1))
    ]
    random.shuffle(candidates)
    if candidates and random.random() < first_probability:
        opening = next(candidate for candidate in candidates if candidate[1] == 0)
        candidates.remove(opening)
        candidates.insert(0, opening)
    chosen: set[tuple[int, int]] = set()
    for block, step, length in candidates:
        union = chosen | {(block, step + i) for i in range(length)}
        if len(union) <= budget:
            chosen = union
    return _runs(sorted(chosen))


def _runs(states: list[tuple[int, int]]) -> list[StateRun]:
    runs: list[StateRun] = []
    for block, step in states:
        last = runs[-1] if runs else None
        if last and last.block == block and last.first + last.length == step:
            runs[-1] = StateRun(block, last.first, last.length + 1)
        else:
            runs.append(StateRun(block, step, 1))
    return runs

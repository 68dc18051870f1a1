"""Work of packed replay in FLOPs, and its division over bins, micro-batches and ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from orl_core.errors import ConfigError, require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Forward and backward FLOPs (3x the forward's) of a packed replay on a dense transformer.

    token  per packed token: projections and gated MLP of every layer
    pair   per visible (query, key) pair: q k^T and p v of every layer
    row    per state token: the output head
    """

    token: float
    pair: float
    row: float

    @classmethod
    def of_transformer(
        cls, *, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocab_size: int
    ) -> "CostModel":
        projections = hidden * head_dim * (2 * heads + 2 * kv_heads)
        return cls(
            token=6.0 * layers * (projections + 3 * hidden * intermediate),
            pair=12.0 * layers * heads * head_dim,
            row=6.0 * hidden * vocab_size,
        )

    def cost(self, *, tokens: int, pairs: int, rows: int) -> float:
        return self.token * tokens + self.pair * pairs + self.row * rows


def balanced_partition(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices of `costs` in `parts` lists of nearly equal sum: longest processing time first.

    The largest sum is at most 4/3 - 1/(3 * parts) of the best possible one (Graham 1969). Ties go by index, so every
    rank computes the same division. Lists may be empty when there are fewer costs than parts.
    """
    require_at_least("parts", parts, 1)
    loads, lists = [0.0] * parts, [[] for _ in range(parts)]
    for index in _descending(costs):
        lightest = min(range(parts), key=loads.__getitem__)
        loads[lightest] += costs[index]
        lists[lightest].append(index)
    return lists


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `sizes` in bins of at most `capacity`. Raises ConfigError for an item larger than that."""
    _check_sizes(sizes, capacity)
    bins: list[list[int]] = []
    free: list[int] = []
    for index in _descending(sizes):
        slot = next((i for i, room in enumerate(free) if room >= sizes[index]), len(bins))
        if slot == len(bins):
            bins.append([])
            free.append(capacity)
        bins[slot].append(index)
        free[slot] -= sizes[index]
    return bins


def micro_batches(costs: Sequence[float], sizes: Sequence[int], *, ranks: int, capacity: int) -> list[list[list[int]]]:
    """Division of units into result[rank][micro_batch] = indices, with the same number of micro-batches on each rank.

    Each micro-batch holds at most `capacity` tokens. Units go, costliest first, to the cheapest micro-batch that has
    room; micro-batches of similar cost then meet in the same step, since ranks wait for one another in each. Some may
    be empty when there are fewer units than ranks.
    """
    _check_sizes(sizes, capacity)
    require_at_least("ranks", ranks, 1)
    steps = max(1, -(-sum(sizes) // (ranks * capacity)))
    while (bins := _place(costs, sizes, ranks * steps, capacity)) is None:
        steps += 1
    load = [sum(costs[i] for i in part) for part in bins]
    order = _descending(load)
    result: list[list[list[int]]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for step in range(steps):
        lightest_first = sorted(range(ranks), key=totals.__getitem__)
        for rank, index in zip(lightest_first, order[step * ranks : (step + 1) * ranks], strict=True):
            result[rank].append(bins[index])
            totals[rank] += load[index]
    return result


def _place(costs: Sequence[float], sizes: Sequence[int], count: int, capacity: int) -> list[list[int]] | None:
    loads, free, bins = [0.0] * count, [capacity] * count, [[] for _ in range(count)]
    for index in _descending(costs):
        fitting = [i for i in range(count) if free[i] >= sizes[index]]
        if not fitting:
            return None
        slot = min(fitting, key=loads.__getitem__)
        loads[slot] += costs[index]
        free[slot] -= sizes[index]
        bins[slot].append(index)
    return bins


def _descending(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def _check_sizes(sizes: Sequence[int], capacity: int) -> None:
    largest = max(sizes, default=0)
    if largest > capacity:
        raise ConfigError(f"a unit of {largest} tokens exceeds the capacity of {capacity}; raise the token budget")

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orl_core.balance import CostModel, balanced_partition, first_fit_decreasing, micro_batches
from orl_core.errors import ConfigError

COSTS = st.lists(st.integers(1, 50), min_size=1, max_size=7)


def best_makespan(costs, parts):
    assignments = itertools.product(range(parts), repeat=len(costs))
    return min(max(sum(c for c, r in zip(costs, a, strict=True) if r == p) for p in range(parts)) for a in assignments)


@given(costs=COSTS, parts=st.integers(1, 3))
def test_the_partition_is_complete_and_within_grahams_bound(costs, parts):
    lists = balanced_partition(costs, parts)
    assert sorted(itertools.chain(*lists)) == list(range(len(costs)))
    largest = max(sum(costs[i] for i in part) for part in lists)
    assert largest <= (4 / 3 - 1 / (3 * parts)) * best_makespan(costs, parts) + 1e-9


@given(sizes=COSTS, capacity=st.integers(50, 90))
def test_bins_hold_everything_and_no_two_could_be_merged(sizes, capacity):
    bins = first_fit_decreasing(sizes, capacity)
    fill = [sum(sizes[i] for i in part) for part in bins]
    assert sorted(itertools.chain(*bins)) == list(range(len(sizes)))
    assert max(fill) <= capacity
    assert all(a + b > capacity for a, b in itertools.combinations(fill, 2))


@given(
    units=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), min_size=1, max_size=30), ranks=st.integers(1, 4)
)
def test_ranks_run_equally_many_micro_batches_within_capacity(units, ranks):
    costs, sizes = zip(*units, strict=True)
    plan = micro_batches(costs, sizes, ranks=ranks, capacity=64)
    assert len(plan) == ranks
    assert len({len(steps) for steps in plan}) == 1
    assert sorted(i for steps in plan for part in steps for i in part) == list(range(len(units)))
    assert all(sum(sizes[i] for i in part) <= 64 for steps in plan for part in steps)


def test_equal_ranks_get_nearly_equal_cost():
    costs = [float(1 + (7 * i) % 23) for i in range(96)]
    plan = micro_batches(costs, [10] * 96, ranks=4, capacity=80)
    loads = [sum(costs[i] for part in steps for i in part) for steps in plan]
    assert max(loads) / min(loads) < 1.02


def test_a_unit_above_the_capacity_is_refused_with_its_size():
    with pytest.raises(ConfigError, match="65 tokens exceeds the capacity of 64"):
        micro_batches([1.0], [65], ranks=1, capacity=64)
    with pytest.raises(ConfigError, match="65 tokens"):
        first_fit_decreasing([65], 64)


def test_the_cost_of_a_transformer_counts_its_matrix_products():
    model = CostModel.of_transformer(
        layers=2, hidden=8, heads=4, kv_heads=2, head_dim=3, intermediate=16, vocab_size=20
    )
    weights = 2 * (8 * 12 + 2 * 8 * 6 + 12 * 8 + 3 * 8 * 16)  # q, k and v, o, MLP of each layer
    multiply_add, passes = 2, 3
    assert model.token == multiply_add * passes * weights
    assert model.pair == multiply_add * passes * 2 * (2 * 12)
    assert model.row == multiply_add * passes * 8 * 20
    assert model.cost(tokens=5, pairs=7, rows=3) == 5 * model.token + 7 * model.pair + 3 * model.row

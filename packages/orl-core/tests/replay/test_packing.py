import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orl_core.errors import ConfigError, ShapeError
from orl_core.packing import ReplayUnit, empty_pack, pack, split_units
from orl_core.selection import StateRun, select_states
from orl_core.visibility import PADDING_SEGMENT


@pytest.fixture
def two_blocks(make_trajectory):
    return make_trajectory(1, prompt=3, canvas=4, steps=[3, 2])


def unit_of(trajectory, *runs):
    return ReplayUnit(trajectory, runs, sum(r.length for r in runs), sum(r.pairs for r in runs))


def test_layout_of_one_response(two_blocks):
    unit = unit_of(two_blocks, StateRun(0, 1, 2), StateRun(1, 0, 1))
    packed = pack([unit], "uniform")
    seen = packed.visibility
    first, second = two_blocks.blocks
    context = torch.cat([two_blocks.prompt_ids, first.tokens])
    assert packed.ids.tolist() == torch.cat([context, first.canvas[1], first.canvas[2], second.canvas[0]]).tolist()
    assert seen.position.tolist() == [*range(7), *[3, 4, 5, 6] * 2, *[7, 8, 9, 10]]
    assert seen.state.tolist() == [0] * 7 + [1] * 4 + [2] * 4 + [3] * 4
    assert seen.limit.tolist() == [*range(1, 8), *[3] * 8, *[7] * 4]
    assert packed.rows.tolist() == list(range(7, 19))
    assert torch.equal(packed.z[packed.rows], torch.cat([first.z[1], first.z[2], second.z[0]]))
    assert packed.z[:7].abs().max() == 0
    assert packed.receives.tolist() == [False] * 7 + [True] * 8 + [False] * 4
    targets = packed.targets
    assert targets.target.tolist() == torch.cat([first.tokens, first.tokens, second.tokens]).tolist()
    assert torch.equal(targets.unresolved, torch.cat([first.unresolved[1], first.unresolved[2], second.unresolved[0]]))
    assert torch.equal(targets.rollout_entropy, torch.cat([first.entropy[1], first.entropy[2], second.entropy[0]]))
    assert targets.state.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert targets.pair.tolist() == [[0, 1]]
    assert targets.state_weight.tolist() == pytest.approx([1 / 3] * 3)
    assert targets.pair_weight.tolist() == [1.0]


def test_masked_states_receive_the_residual_where_unresolved_and_never_at_step_zero(two_blocks):
    packed = pack([unit_of(two_blocks, StateRun(0, 0, 2))], "masked")
    assert packed.receives[packed.rows].tolist() == [False] * 4 + two_blocks.blocks[0].unresolved[1].tolist()


def test_context_ends_where_the_last_replayed_block_starts(two_blocks):
    assert (
        pack([unit_of(two_blocks, StateRun(0, 0, 2))], "uniform").visibility.state.tolist()
        == [0] * 3 + [1] * 4 + [2] * 4
    )


def test_block_causal_context_sees_its_whole_block(two_blocks):
    seen = pack([unit_of(two_blocks, StateRun(1, 0, 2))], "masked", block_causal=True).visibility
    assert seen.limit[:7].tolist() == [3, 3, 3, 7, 7, 7, 7]


@given(seed=st.integers(0, 50), budget=st.integers(1, 6), block_causal=st.booleans())
def test_a_state_sees_its_context_and_itself_and_nothing_else(make_trajectory, seed, budget, block_causal):
    trajectories = [make_trajectory(seed + i, 2 + i, 3, [2, 3]) for i in range(3)]
    units = [unit_of(t, *select_states(t, budget, seed=seed, sample=i)) for i, t in enumerate(trajectories)]
    packed = pack(units, "uniform", block_causal=block_causal)
    mask, begin = packed.visibility.dense_mask(), 0
    for unit in units:
        expected = torch.zeros_like(mask[0])
        at = begin + unit.context
        for run in unit.runs:
            start = unit.trajectory.blocks[run.block].start
            for _ in range(run.length):
                expected[:] = False
                expected[begin : begin + start] = True
                expected[at : at + 3] = True
                assert torch.equal(mask[at : at + 3], expected.expand(3, -1))
                at += 3
        assert not mask[begin : begin + unit.context, begin + unit.context :].any()
        assert not mask[begin : begin + unit.context, :begin].any()
        begin += unit.tokens
    assert begin == len(packed.ids)


@given(seed=st.integers(0, 50), budget=st.integers(2, 9))
def test_unit_counts_tokens_rows_and_visible_pairs(make_trajectory, seed, budget):
    trajectory = make_trajectory(seed, 3, 4, [3, 4])
    unit = unit_of(trajectory, *select_states(trajectory, budget, seed=seed, sample=0))
    packed = pack([unit], "uniform")
    assert (unit.tokens, unit.rows) == (len(packed.ids), len(packed.rows))
    assert unit.visible_pairs == int(packed.visibility.dense_mask().sum())


@given(seed=st.integers(0, 50), token_budget=st.integers(23, 60))
def test_split_units_stay_in_budget_and_keep_runs_and_weights(make_trajectory, seed, token_budget):
    trajectory = make_trajectory(seed, 3, 4, [5, 5, 5])
    runs = select_states(trajectory, 6, seed=seed, sample=0)
    if max(unit_of(trajectory, run).tokens for run in runs) > token_budget:
        with pytest.raises(ConfigError, match="token budget"):
            split_units(trajectory, runs, token_budget)
        return
    units = split_units(trajectory, runs, token_budget)
    assert [run for unit in units for run in unit.runs] == runs
    assert all(unit.tokens <= token_budget for unit in units)
    weights = [pack([unit], "uniform").targets for unit in units]
    assert sum(w.state_weight.double().sum() for w in weights) == pytest.approx(1)
    assert sum(w.pair_weight.double().sum() for w in weights) == pytest.approx(1)


def test_padding_sees_itself_and_adds_no_rows(two_blocks):
    packed = pack([unit_of(two_blocks, StateRun(0, 0, 2))], "uniform")
    longer = packed.padded(16, pad_id=9)
    assert longer.ids[11:].tolist() == [9] * 5
    assert longer.visibility.segment[11:].tolist() == [PADDING_SEGMENT] * 5
    assert torch.equal(longer.visibility.dense_mask()[11:, 11:], torch.eye(5, dtype=torch.bool))
    assert torch.equal(longer.rows, packed.rows)
    assert not longer.receives[11:].any()
    with pytest.raises(ShapeError, match="11 tokens"):
        packed.padded(10)


def test_an_empty_pack_has_the_shapes_of_a_pack(two_blocks):
    packed, empty = pack([unit_of(two_blocks, StateRun(0, 0, 2))], "uniform"), empty_pack(8, length=5, pad_id=7)
    assert empty.ids.tolist() == [7] * 5
    assert empty.z.shape == (5, 8)
    assert len(empty.rows) == len(empty.targets.target) == len(empty.targets.pair) == 0
    for name in ("ids", "receives", "rows"):
        assert getattr(empty, name).dtype == getattr(packed, name).dtype
    assert empty.targets.pair.shape[1] == packed.targets.pair.shape[1]


def test_packing_nothing_and_a_context_beyond_the_response_are_refused(two_blocks, make_trajectory):
    with pytest.raises(ShapeError, match="at least one unit"):
        pack([], "uniform")
    short = make_trajectory(1, 3, 4, [2, 2])
    broken = type(short)(short.prompt_ids, short.response_ids[:2], short.blocks, "length", 0)
    with pytest.raises(ShapeError, match="only 5 tokens"):
        pack([unit_of(broken, StateRun(1, 0, 2))], "uniform")

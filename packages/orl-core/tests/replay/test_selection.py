import pytest
from hypothesis import given
from hypothesis import strategies as st

from orl_core.errors import ConfigError
from orl_core.selection import select_states

STEPS = st.lists(st.integers(1, 7), min_size=1, max_size=4)


def states_of(runs):
    return [(run.block, run.first + i) for run in runs for i in range(run.length)]


@given(steps=STEPS, budget=st.integers(1, 12), seed=st.integers(0, 99), sample=st.integers(0, 99))
def test_selected_states_exist_are_distinct_and_within_the_budget(make_trajectory, steps, budget, seed, sample):
    runs = select_states(make_trajectory(0, 2, 3, steps), budget, seed=seed, sample=sample)
    states = states_of(runs)
    assert 1 <= len(states) <= budget
    assert len(set(states)) == len(states)
    assert states == sorted(states)
    assert all(0 <= step < steps[block] for block, step in states)


@given(steps=STEPS, budget=st.integers(2, 12), seed=st.integers(0, 99))
def test_every_state_has_an_adjacent_partner_unless_its_block_has_one_step(make_trajectory, steps, budget, seed):
    for run in select_states(make_trajectory(0, 2, 3, steps), budget, seed=seed, sample=0):
        assert run.pairs >= 1 or steps[run.block] == 1


@given(steps=STEPS, seed=st.integers(0, 99))
def test_a_budget_that_covers_all_states_selects_whole_blocks(make_trajectory, steps, seed):
    runs = select_states(make_trajectory(0, 2, 3, steps), sum(steps), seed=seed, sample=1)
    assert [(run.block, run.first, run.length) for run in runs] == [(b, 0, n) for b, n in enumerate(steps)]


def test_the_draw_depends_on_seed_and_sample_only(make_trajectory):
    one, other = make_trajectory(0, 2, 3, [9, 9]), make_trajectory(5, 4, 3, [9, 9])
    assert select_states(one, 2, seed=3, sample=8) == select_states(other, 2, seed=3, sample=8)
    draws = {tuple(select_states(one, 2, seed=3, sample=i)) for i in range(200)}
    assert len(draws) == 16  # every adjacent pair of two blocks of nine steps comes up
    assert draws == {tuple(select_states(one, 2, seed=4, sample=i)) for i in range(200)}


def test_first_probability_raises_the_share_of_first_steps(make_trajectory):
    trajectory = make_trajectory(0, 2, 3, [9])

    def first_steps(probability):
        runs = [select_states(trajectory, 2, seed=0, sample=i, first_probability=probability)[0] for i in range(300)]
        return sum(run.first == 0 for run in runs)

    assert first_steps(1.0) == 300
    assert first_steps(0.0) < 75 < first_steps(0.5)


@pytest.mark.parametrize(("budget", "probability"), [(0, 0.5), (2, 1.5)])
def test_settings_outside_their_range_are_refused(make_trajectory, budget, probability):
    with pytest.raises(ConfigError):
        select_states(make_trajectory(0, 2, 3, [2]), budget, seed=0, sample=0, first_probability=probability)

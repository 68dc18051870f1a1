from math import isclose, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orl_eval.measures import Z_95, Score, summarize, wilson_interval

counts = st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


def score(tokens: int, forwards: int, *, commits: int = 1, correct: bool = True, finish: str = "stop") -> Score:
    return Score(0, 0, "p", "r", "a", finish, correct, correct, tokens, forwards, commits, seconds=0.5)


@given(counts)
def test_wilson_bounds_solve_the_score_equation(count):
    successes, n = count
    share = successes / n
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= share <= high <= 1
    for bound in (low, high):
        if 0 < bound < 1:
            assert isclose(abs(share - bound), Z_95 * sqrt(bound * (1 - bound) / n), rel_tol=1e-6, abs_tol=1e-9)


@given(counts)
def test_wilson_is_symmetric_in_successes_and_failures(count):
    successes, n = count
    low, high = wilson_interval(successes, n)
    assert wilson_interval(n - successes, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_wilson_of_published_example():
    # 81 of 263 gives .2553 to .3662 (Newcombe 1998, Statistics in Medicine 17, table I, method 3)
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_impossible_counts(successes, n):
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(successes, n)


def test_headline_tpf_is_all_tokens_over_all_forwards():
    summary = summarize([score(100, 10, commits=4), score(1, 1)])
    assert summary.tpf == 101 / 11
    assert summary.tpf_commit == 101 / 16
    assert summary.tpf_mean == (10 + 1) / 2
    assert summary.tpf_commit_mean == (100 / 14 + 1 / 2) / 2


def test_shares_and_speed():
    scores = [score(4, 2), score(4, 2, correct=False, finish="length"), score(4, 2), score(4, 2)]
    summary = summarize(scores)
    assert (summary.n, summary.accuracy, summary.truncated) == (4, 0.75, 1)
    assert summary.accuracy_interval == wilson_interval(3, 4)
    assert summary.tokens_per_second == 16 / 2.0

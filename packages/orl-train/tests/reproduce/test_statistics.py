"""Intervals against known values."""

import pytest

from orl_train.reproduce.statistics import accuracy_difference_interval, ratio_interval, tpf_interval, wilson


def test_wilson_against_published_values():
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(20, 20)[1] == pytest.approx(1.0)


def test_the_bootstrap_agrees_with_the_normal_approximation(point):
    tokens = [20 + index % 21 for index in range(2100)]
    low, high = tpf_interval(point(right=[1] * 2100, tokens=tokens, forwards=[10] * 2100))
    half = 1.96 * (sum((t - 30) ** 2 for t in tokens) / 2100) ** 0.5 / 10 / 2100**0.5
    assert (low, high) == pytest.approx((3 - half, 3 + half), abs=0.1 * half)


def test_comparisons_are_paired(point):
    one, twice = point(tokens=[60, 80, 100, 120]), point()
    assert ratio_interval(one, twice) == pytest.approx((2.0, 2.0))
    assert accuracy_difference_interval(one, twice) == pytest.approx((0.0, 0.0))
    low, high = accuracy_difference_interval(one, point(right=[0, 1, 0, 0]))
    assert low <= 0.5 <= high

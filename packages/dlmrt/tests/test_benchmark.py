import pytest

from dlmrt.benchmark import percentile


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([3], 50, 3), ([3], 95, 3), ([2, 1], 50, 1), ([1, 2, 3], 50, 2), (range(1, 101), 95, 95), (range(1, 21), 95, 19)],
)
def test_percentile_is_the_nearest_rank(values, percent, expected):
    assert percentile(list(values), percent) == expected

"""Intervals (95%): Wilson's for accuracy, a bootstrap over problems for tokens per forward and for comparisons."""

from collections.abc import Callable, Sequence
from math import sqrt

import torch
from torch import Tensor

from orl_train.reproduce.sweep import Measurement

Interval = tuple[float, float]
RESAMPLES = 2000
_Z = 1.959964


def wilson(right: int, n: int) -> Interval:
    """Wilson's score interval of a proportion right / n."""
    share, square = right / n, _Z * _Z / n
    centre = share + square / 2
    half = _Z * sqrt(share * (1 - share) / n + square / (4 * n))
    return max(0.0, (centre - half) / (1 + square)), min(1.0, (centre + half) / (1 + square))


def tpf_interval(one: Measurement) -> Interval:
    """Interval of all tokens / all forwards."""
    return _bootstrap(one.n, lambda rows: _tpf(one, rows))


def ratio_interval(one: Measurement, other: Measurement) -> Interval:
    """Interval of TPF(one) / TPF(other) on the same problems, which are drawn together."""
    return _bootstrap(one.n, lambda rows: _tpf(one, rows) / _tpf(other, rows))


def accuracy_difference_interval(one: Measurement, other: Measurement) -> Interval:
    """Interval of accuracy(one) - accuracy(other) on the same problems, which are drawn together."""
    return _bootstrap(one.n, lambda rows: _mean(one.right, rows) - _mean(other.right, rows))


def _mean(values: Sequence[int], rows: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[rows].mean(-1)


def _tpf(one: Measurement, rows: Tensor) -> Tensor:
    return _mean(one.tokens, rows) / _mean(one.forwards, rows)


def _bootstrap(n: int, measure: Callable[[Tensor], Tensor]) -> Interval:
    rows = torch.randint(n, (RESAMPLES, n), generator=torch.Generator().manual_seed(0))
    low, high = torch.quantile(measure(rows), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high

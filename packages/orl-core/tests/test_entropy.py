"""Entropies, token statistics and Gumbel sampling against float64 loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orl_core.entropy import entropy, sample_gumbel, token_stats

logit_rows = st.lists(
    st.floats(-30, 30, width=32) | st.just(-math.inf),
    min_size=2,
    max_size=9,
).filter(lambda row: any(math.isfinite(x) for x in row))


def probabilities(row: list[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(x - top) if math.isfinite(x) else 0.0 for x in row]
    return [w / sum(weights) for w in weights]


def entropy_of(p: list[float]) -> float:
    return -sum(q * math.log(q) for q in p if q > 0)


@given(logit_rows)
def test_entropy_is_that_of_a_float64_loop(row):
    expected = entropy_of(probabilities(row))
    assert entropy(torch.tensor(row, dtype=torch.float64)).item() == pytest.approx(expected, abs=1e-12)
    assert entropy(torch.tensor(row)).item() == pytest.approx(expected, abs=1e-5)


def test_entropy_of_the_uniform_distribution_is_log_of_the_vocabulary():
    assert entropy(torch.zeros(3, 8), dim=-1) == pytest.approx(math.log(8))
    assert entropy(torch.zeros(3, 8), dim=0) == pytest.approx(math.log(3))


def test_entropy_has_a_finite_gradient_where_logits_are_suppressed():
    logits = torch.tensor([[1.0, 2.0, -math.inf], [0.0, -math.inf, -math.inf]], requires_grad=True)
    entropy(logits).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    finite = torch.tensor([[1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(entropy, (finite,))


@given(logit_rows, st.data())
def test_token_stats_are_those_of_a_float64_loop(row, data):
    p = probabilities(row)
    candidate = data.draw(st.integers(0, len(row) - 1))
    stats = token_stats(torch.tensor([[row]]), torch.tensor([[candidate]]))
    assert row[stats.argmax.item()] == max(row)
    assert stats.candidate.item() == candidate
    assert stats.candidate_prob.item() == pytest.approx(p[candidate], abs=1e-6)
    assert stats.top_prob.item() == pytest.approx(max(p), abs=1e-6)
    assert stats.entropy.item() == pytest.approx(entropy_of(p), abs=1e-5)


def test_without_a_candidate_it_is_the_argmax_and_everything_is_float32():
    stats = token_stats(torch.tensor([[[0.0, 3.0, 1.0]]], dtype=torch.bfloat16))
    assert stats.candidate.tolist() == stats.argmax.tolist() == [[1]]
    assert stats.candidate_prob.tolist() == stats.top_prob.tolist()
    assert stats.candidate_prob.dtype == stats.top_prob.dtype == stats.entropy.dtype == torch.float32


def test_gumbel_samples_have_the_frequencies_of_the_softmax():
    n = 20_000
    p = torch.tensor([0.5, 0.25, 0.2, 0.05, 0.0])
    uniform = torch.rand(n, 1, 5, generator=torch.Generator().manual_seed(0)).clamp(min=1e-7)
    samples = sample_gumbel(p.log().expand(n, 1, 5), uniform)
    observed = samples.flatten().bincount(minlength=5)
    assert samples.dtype == torch.int64
    assert observed[4] == 0, "a suppressed token was sampled"
    chi_square = ((observed - n * p)[:4] ** 2 / (n * p)[:4]).sum()
    assert chi_square < 16.3  # 0.999 quantile of chi-square with 3 degrees of freedom

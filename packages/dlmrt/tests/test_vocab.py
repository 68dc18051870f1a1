"""The chunked pass over the vocabulary against orl-core's formulas on whole logits, in float64 where it matters."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmrt.loop.draws import Draw
from dlmrt.truncation import Truncation
from dlmrt.vocab import VocabularyPass
from orl_core.entropy import sample_gumbel, token_stats
from orl_core.residual import expected_embedding, expected_embedding_top_k
from orl_core.rng import CounterRng, Stream

ROWS, CANVAS, WIDTH = 2, 3, 8


def inputs(vocab, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, CANVAS, WIDTH, generator=generator) * scale
    head, embedding = torch.randn(2, vocab, WIDTH, generator=generator)
    return hidden, head, embedding, torch.tensor([1.0, 0.6])


def whole_logits(hidden, head, temperature, softcap=None, suppressed=()):
    logits = hidden @ head.T
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits / temperature[:, None, None]
    logits[..., list(suppressed)] = -torch.inf
    return logits


def draw_of(seed=3):
    return Draw(torch.tensor([seed, seed + 1]), torch.tensor([0, 2]), torch.tensor([1, 4]))


@given(vocab=st.integers(2, 70), chunk=st.integers(1, 80), seed=st.integers(0, 99), scale=st.sampled_from([0.1, 1, 10]))
@settings(deadline=None, max_examples=40)
def test_statistics_and_z_equal_the_formulas_for_every_chunking(vocab, chunk, seed, scale):
    hidden, head, embedding, temperature = inputs(vocab, seed, scale)
    suppressed = (0,) if vocab > 2 else ()
    logits = whole_logits(hidden, head, temperature, suppressed=suppressed)
    pass_ = VocabularyPass(head=head, embedding=embedding, suppressed=suppressed, chunk=chunk)
    draw = draw_of(seed)
    got = pass_(hidden, temperature, draw, with_z=True)
    uniform = CounterRng(draw.seed).uniform(Stream.CANDIDATE, draw.block, draw.step, CANVAS, vocab)
    expected = token_stats(logits, sample_gumbel(logits, uniform))
    assert torch.equal(got.tokens.argmax, expected.argmax)
    assert torch.equal(got.tokens.candidate, expected.candidate)
    for name in ("candidate_prob", "top_prob", "entropy"):
        torch.testing.assert_close(getattr(got.tokens, name), getattr(expected, name), atol=2e-6, rtol=2e-5)
    z = expected_embedding(logits.double().softmax(-1), embedding.double())
    torch.testing.assert_close(got.z.double(), z, atol=2e-5, rtol=1e-5)
    assert got.missed is None


@pytest.mark.parametrize("chunk", [5, 7, 64])
def test_softcap_and_embedding_scale(chunk):
    hidden, head, embedding, temperature = inputs(40, scale=10)
    pass_ = VocabularyPass(head=head, embedding=embedding, softcap=3.0, embedding_scale=4.0, chunk=chunk)
    got = pass_(hidden, temperature, None, with_z=True)
    logits = whole_logits(hidden, head, temperature, softcap=3.0)
    torch.testing.assert_close(got.tokens.top_prob, token_stats(logits).top_prob, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got.z, logits.softmax(-1) @ (embedding * 4), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [3, 16, 64])
@pytest.mark.parametrize("k", [1, 5, 40, 100])
def test_top_k_z_equals_the_formula_and_reports_the_missed_mass(chunk, k):
    hidden, head, embedding, temperature = inputs(40)
    pass_ = VocabularyPass(head=head, embedding=embedding, z_top_k=k, chunk=max(chunk, min(k, 40)))
    got = pass_(hidden, temperature, None, with_z=True)
    probabilities = whole_logits(hidden, head, temperature).softmax(-1)
    z, missed = expected_embedding_top_k(probabilities, embedding, k)
    torch.testing.assert_close(got.z, z, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.missed, missed, atol=1e-6, rtol=0)


def test_greedy_candidate_is_the_most_probable_token_and_z_is_made_only_on_demand():
    hidden, head, embedding, temperature = inputs(40)
    got = VocabularyPass(head=head, embedding=embedding)(hidden, temperature, None, with_z=False)
    assert torch.equal(got.tokens.candidate, got.tokens.argmax)
    assert torch.equal(got.tokens.candidate_prob, got.tokens.top_prob)
    assert got.z is None


def allowed_tokens(logits, top_k, top_p):
    """Per position, by a plain loop: the tokens that may be sampled."""
    allowed = torch.zeros_like(logits, dtype=torch.bool)
    for b, c in product(range(ROWS), range(CANVAS)):
        row = logits[b, c].tolist()
        order = sorted(range(len(row)), key=lambda v: -row[v])[:top_k]
        weights = [math.exp(row[v] - row[order[0]]) for v in order]
        mass, kept = 0.0, []
        for v, weight in zip(order, weights, strict=True):
            if top_p is not None and kept and mass >= top_p:
                break
            kept.append(v)
            mass += weight / sum(weights)
        allowed[b, c] = torch.tensor([value >= row[kept[-1]] for value in row])
    return allowed


@given(
    vocab=st.integers(2, 60),
    chunk=st.integers(1, 70),
    seed=st.integers(0, 99),
    top_k=st.none() | st.integers(1, 70),
    top_p=st.none() | st.floats(0.01, 1),
    scale=st.sampled_from([0.1, 1, 10]),
)
@settings(deadline=None, max_examples=40)
def test_top_k_and_top_p_sample_as_the_whole_vocabulary_would(vocab, chunk, seed, top_k, top_p, scale):
    hidden, head, embedding, temperature = inputs(vocab, seed, scale)
    truncation, draw = Truncation(top_k, top_p), draw_of(seed)
    logits = whole_logits(hidden, head, temperature)
    uniform = CounterRng(draw.seed).uniform(Stream.CANDIDATE, draw.block, draw.step, CANVAS, vocab)
    masked = logits.masked_fill(~allowed_tokens(logits, top_k, top_p), -torch.inf)
    expected = token_stats(logits, sample_gumbel(masked, uniform))
    pass_ = VocabularyPass(head=head, embedding=embedding, chunk=chunk, truncation=truncation)
    got = pass_(hidden, temperature, draw, with_z=True)
    assert torch.equal(got.tokens.candidate, expected.candidate)
    for name in ("candidate_prob", "top_prob", "entropy"):  # of the whole distribution
        torch.testing.assert_close(getattr(got.tokens, name), getattr(expected, name), atol=2e-6, rtol=2e-5)
    z = expected_embedding(logits.double().softmax(-1), embedding.double())
    torch.testing.assert_close(got.z.double(), z, atol=2e-5, rtol=1e-5)


def test_tokens_that_tie_with_the_last_one_kept_are_kept():
    logits = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0, 3.0])
    for truncation, expected in [
        (Truncation(top_k=1), {5}),
        (Truncation(top_k=2), {1, 2, 4, 5}),
        (Truncation(top_p=0.5), {1, 2, 4, 5}),
        (Truncation(top_k=1, top_p=0.01), {5}),
        (Truncation(top_k=5, top_p=0.999), {0, 1, 2, 4, 5}),
        (Truncation(top_p=1.0), {0, 1, 2, 3, 4, 5}),
    ]:
        pass_ = VocabularyPass(head=logits[:, None], embedding=torch.eye(6), truncation=truncation, chunk=3)
        zeros = torch.zeros(400, dtype=torch.int64)
        draw = Draw(torch.arange(400), zeros, zeros)
        got = pass_(torch.ones(400, 1, 1), torch.full((400,), 1.0), draw, with_z=False)
        assert set(got.tokens.candidate.flatten().tolist()) == expected


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_control_tokens_are_predicted_only_where_they_are_allowed(chunk):
    hidden, head, embedding, temperature = inputs(20)
    pass_ = VocabularyPass(head=head, embedding=embedding, suppressed=(3,), control=(6, 19), chunk=chunk)
    allowed = torch.tensor([[True, False, True], [False, False, True]])
    for given_mask, control in ((allowed, allowed), (None, torch.zeros_like(allowed))):
        got = pass_(hidden, temperature, None, with_z=True, control_BC=given_mask)
        logits = whole_logits(hidden, head, temperature, suppressed=(3,))
        logits[..., [6, 19]] = logits[..., [6, 19]].masked_fill(~control[..., None], -torch.inf)
        assert torch.equal(got.tokens.argmax, logits.argmax(-1))
        torch.testing.assert_close(got.tokens.entropy, token_stats(logits).entropy, atol=2e-6, rtol=2e-5)
        torch.testing.assert_close(got.z, logits.softmax(-1) @ embedding, atol=2e-5, rtol=1e-5)


def test_equal_logits_give_the_lowest_token_whatever_the_chunking():
    head = torch.ones(12, WIDTH)
    for chunk in (1, 5, 12):
        pass_ = VocabularyPass(head=head, embedding=head, chunk=chunk)
        got = pass_(torch.ones(1, 1, WIDTH), torch.ones(1), None, with_z=False)
        assert got.tokens.argmax.item() == 0


@pytest.mark.parametrize(("first", "last"), [(0, 10), (4, 12), (3, 11), (5, 6), (8, 30)])
def test_lanes_of_a_chunk_are_those_of_the_whole_draw(first, last):
    draw = draw_of(-9)
    whole = CounterRng(draw.seed).uniform(Stream.CANDIDATE, draw.block, draw.step, CANVAS, 30)
    assert torch.equal(draw.uniform(CANVAS, first, last), whole[..., first:last])

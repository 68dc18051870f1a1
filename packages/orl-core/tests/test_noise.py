"""Noise of both state families and the block-diffusion loss."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from orl_core.errors import ConfigError
from orl_core.noise import corrupt, diffusion_loss, loss_weights, sample_levels

FAMILIES = ("masked", "uniform")
MASK, VOCAB = 9, 10


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noisy(clean: torch.Tensor, level: float, family, seed: int):
    return corrupt(clean, torch.full(clean.shape, level), family, generator(seed), vocab_size=VOCAB, mask_id=MASK)


@given(st.integers(0, 10**6), st.integers(1, 40), st.floats(0, 0.5), st.floats(0.5, 1))
def test_levels_fall_into_one_stratum_each(seed, blocks, low, high):
    levels = sample_levels(blocks, generator(seed), low, high)
    assert levels.dtype == torch.float32
    for k, level in enumerate(levels.sort().values.double().tolist()):
        width = (high - low) / blocks
        assert low + k * width - 1e-6 <= level <= low + (k + 1) * width + 1e-6


def test_strata_are_shuffled_over_the_blocks():
    levels = torch.stack([sample_levels(4, generator(seed), 0.0, 1.0) for seed in range(400)])
    assert levels.mean(0).tolist() == pytest.approx([0.5] * 4, abs=0.06)  # 4 standard errors


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_is_corrupted_alike_in_every_batch(family):
    """Each sample has a generator of its own, so neither its neighbours nor their order touch it."""
    samples = [torch.arange(8) % 8, torch.zeros(5, dtype=torch.int64), torch.arange(6)]
    forward = {i: noisy(samples[i], 0.5, family, seed=i).tokens for i in (0, 1, 2)}
    backward = {i: noisy(samples[i], 0.5, family, seed=i).tokens for i in (2, 1, 0)}
    assert all(torch.equal(forward[i], backward[i]) for i in forward)
    assert not torch.equal(noisy(samples[0], 0.5, family, seed=0).tokens, noisy(samples[0], 0.5, family, seed=7).tokens)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", [0.0, 0.3, 1.0])
def test_corruption_has_the_given_rate_and_leaves_the_rest(family, level):
    clean = torch.arange(20_000) % MASK
    result = noisy(clean, level, family, seed=1)
    kept = ~result.corrupted
    assert torch.equal(result.tokens[kept], clean[kept])
    assert result.tokens.dtype == torch.int64
    tolerance = 4 * math.sqrt(level * (1 - level) / len(clean))
    assert result.corrupted.double().mean().item() == pytest.approx(level, abs=tolerance)
    assert torch.equal(result.level, torch.full(clean.shape, level))


def test_masked_noise_is_the_mask_and_uniform_noise_is_uniform():
    clean = torch.zeros(20_000, dtype=torch.int64)
    assert (noisy(clean, 1.0, "masked", seed=0).tokens == MASK).all()
    counts = noisy(clean, 1.0, "uniform", seed=0).tokens.bincount(minlength=VOCAB)
    assert len(counts) == VOCAB
    assert ((counts - 2000) ** 2 / 2000).sum() < 27.9  # 0.999 quantile of chi-square with 9 degrees of freedom


def test_each_token_has_its_own_level():
    clean = torch.zeros(2000, dtype=torch.int64)
    level = torch.arange(2000) % 2  # 0, 1, 0, 1, ...
    hit = corrupt(clean, level.float(), "masked", generator(0), vocab_size=VOCAB, mask_id=MASK).corrupted
    assert torch.equal(hit, level.bool())


def test_the_masked_family_needs_a_mask_id():
    clean = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ConfigError, match="mask_id is None"):
        corrupt(clean, torch.ones(2), "masked", generator(0), vocab_size=VOCAB)


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.sampled_from(FAMILIES), st.floats(0.01, 3))
@example([False], "uniform", 0.25)
@example([False], "masked", 0.25)
def test_weights_sum_to_1(corrupted, family, clean_weight):
    weight = loss_weights(torch.tensor(corrupted), family, clean_weight)
    raw = [1.0 if c else clean_weight if family == "uniform" else 0.0 for c in corrupted]
    if sum(raw) == 0:
        assert weight.tolist() == raw
    else:
        assert weight.tolist() == pytest.approx([w / sum(raw) for w in raw], rel=1e-5)
        assert weight.sum().item() == pytest.approx(1, abs=1e-5)


@given(st.integers(0, 10**6), st.integers(1, 8))
def test_the_loss_is_a_weighted_cross_entropy_in_float64(seed, count):
    rng = generator(seed)
    logits = torch.randn(count, 6, generator=rng, dtype=torch.float64) * 4
    target = torch.randint(6, (count,), generator=rng)
    weight = torch.rand(count, generator=rng, dtype=torch.float64)
    expected = sum(
        w * (math.log(sum(math.exp(x) for x in row)) - row[t])
        for row, t, w in zip(logits.tolist(), target.tolist(), weight.tolist(), strict=True)
    )
    loss = diffusion_loss(logits.float(), target, weight.float())
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)

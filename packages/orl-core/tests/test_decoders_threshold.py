"""Threshold decoding against plain loops of the published rules and against recorded LLaDA2.0 runs."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orl_core.decoders import Threshold
from orl_core.entropy import TokenStats, token_stats
from orl_core.errors import ConfigError, ShapeError

C, V, MASK = 6, 7, 6


def random_stats(seed: int, steps: int, sharpness: float):
    """One row's candidates and their probabilities for every step; the mask token is suppressed."""
    logits = torch.randn(steps, 1, C, V, generator=torch.Generator().manual_seed(seed)) * sharpness
    logits[..., MASK] = -torch.inf
    return [token_stats(step) for step in logits]


def reference_step(canvas: list[int], x0: list[int], p: list[float], threshold: float, quota: int) -> list[int]:
    """Commit all masked positions with p > threshold if they are at least `quota`, else the `quota` best ones."""
    masked = [i for i, token in enumerate(canvas) if token == MASK]
    commit = [i for i in masked if p[i] > threshold]
    if len(commit) < quota:
        commit = sorted(masked, key=lambda i: (-p[i], i))[:quota]
    return [x0[i] if i in commit else token for i, token in enumerate(canvas)]


def compare(run_decoder, no_draws, decoder, stats, prompt, quota_of_step):
    fixed = torch.arange(C)[None] % MASK
    editable = torch.arange(C)[None] >= prompt
    states = run_decoder(decoder, lambda k, state: stats[k], fixed, editable, no_draws)
    canvas = [token if i < prompt else MASK for i, token in enumerate(fixed[0].tolist())]
    forwards = 0
    for state in states:
        assert state.canvas[0].tolist() == canvas
        assert state.unresolved[0].tolist() == [token == MASK for token in canvas]
        if MASK in canvas:
            x0, p = stats[forwards].candidate[0].tolist(), stats[forwards].candidate_prob[0].tolist()
            canvas = reference_step(canvas, x0, p, decoder.threshold, quota_of_step(forwards))
            forwards += 1
    assert len(states) == 1 + forwards
    assert MASK not in decoder.result(states[-1])[0].tolist()
    return forwards


@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0.3, 6), st.integers(0, C))
def test_commits_all_above_the_threshold_and_at_least_one(run_decoder, no_draws, seed, threshold, sharpness, prompt):
    decoder = Threshold(MASK, C, threshold)
    compare(run_decoder, no_draws, decoder, random_stats(seed, C, sharpness), prompt, lambda step: 1)


@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0.3, 6), st.integers(0, C), st.integers(1, C))
def test_follows_the_transfer_schedule(run_decoder, no_draws, seed, threshold, sharpness, prompt, steps):
    schedule = [C // steps + (k < C % steps) for k in range(steps)]
    decoder = Threshold(MASK, C, threshold, steps=steps)
    stats = random_stats(seed, C, sharpness)
    assert compare(run_decoder, no_draws, decoder, stats, prompt, lambda step: schedule[step]) <= steps


@pytest.mark.parametrize(
    "run", ["t05_b8", "t07_b16", "t09_b32", "t095_b32_s8", "t095_b16_s12", "eos_b8", "eos_early_b8"]
)
def test_reproduces_a_recorded_llada2_run(load_golden, run_decoder, no_draws, replay, run):
    golden, configs = load_golden("llada2_runs")
    config = configs[f"generate20/{run}"]
    decoder = Threshold(config["mask_id"], config["block_length"], config["threshold"], steps=config["steps"])
    assert replay(decoder, golden, f"generate20/{run}") == config["num_forwards"]


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_rows_of_a_batch_are_decoded_as_if_alone(run_decoder, no_draws, seed):
    decoder = Threshold(MASK, C, 0.6)
    rows = [random_stats(seed + i, C, sharpness) for i, sharpness in enumerate((0.5, 2.0, 8.0))]
    editable, fixed = torch.ones(1, C, dtype=torch.bool), torch.zeros(1, C, dtype=torch.int64)
    alone = [run_decoder(decoder, lambda k, s, row=row: row[k], fixed, editable, no_draws)[-1] for row in rows]

    def batch(k, state):
        names = ("argmax", "candidate", "candidate_prob", "top_prob", "entropy")
        return TokenStats(*(torch.cat([getattr(row[k], name) for row in rows]) for name in names))

    together = run_decoder(decoder, batch, fixed.expand(3, C), editable.expand(3, C), no_draws)[-1]
    for i, state in enumerate(alone):
        assert together.canvas[i].tolist() == state.canvas[0].tolist()
        assert together.step[i] == state.step[0]


def test_a_probability_at_the_threshold_does_not_exceed_it(no_draws):
    decoder, block = Threshold(MASK, 3, threshold=0.5), torch.zeros(1, dtype=torch.int64)
    token, p = torch.tensor([[1, 2, 3]]), torch.tensor([[0.5, 0.75, 0.5]])
    state = decoder.init(token, token > 0, no_draws, block)
    after = decoder.step(TokenStats(token, token, p, p, torch.zeros(1, 3)), state, no_draws, block)
    assert after.canvas.tolist() == [[MASK, 2, MASK]]


@pytest.mark.parametrize("steps", [None, 3])
def test_stops_even_where_the_mask_token_is_predicted(run_decoder, no_draws, steps):
    decoder = Threshold(MASK, C, 1.0, steps=steps)
    logits = torch.zeros(1, C, V)
    logits[..., MASK] = 5.0
    editable, fixed = torch.ones(1, C, dtype=torch.bool), torch.zeros(1, C, dtype=torch.int64)
    states = run_decoder(decoder, lambda k, state: token_stats(logits), fixed, editable, no_draws)
    assert len(states) == 1 + (steps or C)


def test_temperature_and_greedy_follow_the_sampling_temperature(no_draws):
    fixed, editable = torch.zeros(2, C, dtype=torch.int64), torch.ones(2, C, dtype=torch.bool)
    for setting, greedy, temperature in ((0.0, True, 1.0), (0.5, False, 0.5)):
        decoder = Threshold(MASK, C, sampling_temperature=setting)
        assert decoder.greedy is greedy
        state = decoder.init(fixed, editable, no_draws, torch.zeros(2, dtype=torch.int64))
        assert decoder.temperature(state).tolist() == [temperature] * 2


def test_a_step_needs_no_value_from_the_device(no_draws):
    for decoder in (Threshold(MASK, C), Threshold(MASK, C, steps=4)):
        block = torch.zeros(2, dtype=torch.int64, device="meta")
        fixed = torch.zeros(2, C, dtype=torch.int64, device="meta")
        state = decoder.init(fixed, torch.ones(2, C, dtype=torch.bool, device="meta"), no_draws, block)
        logits = torch.zeros(2, C, V, device="meta") / decoder.temperature(state)[:, None, None]
        after = decoder.step(token_stats(logits), state, no_draws, block)
        assert (decoder.result(after).shape, after.done.shape) == ((2, C), (2,))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"canvas_length": 0}, "canvas_length is 0"),
        ({"sampling_temperature": -1.0}, "sampling_temperature is -1.0"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": C + 1}, f"steps is {C + 1}"),
    ],
)
def test_settings_out_of_range_are_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        Threshold(**({"mask_id": MASK, "canvas_length": C} | setting))


def test_a_block_longer_than_the_canvas_is_refused(no_draws):
    fixed = torch.zeros(1, C + 1, dtype=torch.int64)
    with pytest.raises(ShapeError, match=f"{C + 1} positions"):
        Threshold(MASK, C).init(fixed, fixed == 0, no_draws, torch.zeros(1, dtype=torch.int64))


def test_answer_prob_is_that_of_the_step_that_committed(run_decoder, no_draws):
    logits = torch.randn(C, 1, C, V, generator=torch.Generator().manual_seed(0)) * 3
    logits[..., MASK] = -torch.inf
    stats = [token_stats(step) for step in logits]
    fixed, editable = torch.arange(C)[None], torch.arange(C)[None] > 0
    states = run_decoder(Threshold(MASK, C, threshold=0.7), lambda k, state: stats[k], fixed, editable, no_draws)
    expected = [1.0] * C
    for k, (before, after) in enumerate(pairwise(states)):
        for i in (before.unresolved & ~after.unresolved)[0].nonzero().flatten().tolist():
            expected[i] = stats[k].candidate_prob[0, i].item()
    assert states[-1].answer_prob[0].tolist() == expected
    assert len(states) > 3

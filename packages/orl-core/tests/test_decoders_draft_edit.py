"""Draft-and-edit decoding against a plain loop of the published rule and against recorded LLaDA2.1 runs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orl_core.decoders import DraftEdit
from orl_core.entropy import TokenStats, token_stats
from orl_core.errors import ConfigError, ShapeError

C, V, MASK, POST = 6, 7, 6, 4


def random_stats(seed: int, sharpness: float):
    """One row's statistics: a fixed preference and noise, so that runs edit, settle and oscillate."""
    generator = torch.Generator().manual_seed(seed)
    preference = torch.randn(1, C, V, generator=generator) * sharpness
    noise = torch.randn(C + POST, 1, C, V, generator=generator) * sharpness / 2
    logits = preference + noise
    logits[..., MASK] = -torch.inf
    return [token_stats(step) for step in logits]


def reference_block(canvas, editable, stats, threshold, edit_threshold, max_post_steps, min_transfer):
    """LLaDA2.1's loop over one block; yields the canvas after each forward."""
    post_steps = forwards = 0
    while True:
        masked = [i for i, token in enumerate(canvas) if token == MASK]
        if not masked:
            post_steps += 1
            if post_steps > max_post_steps:
                return
        x0, p = stats[forwards].candidate[0].tolist(), stats[forwards].candidate_prob[0].tolist()
        forwards += 1
        fill = [i for i in masked if p[i] > threshold]
        if len(fill) < min_transfer:
            fill = sorted(masked, key=lambda i: (-p[i], i))[:min_transfer]
        edit = [
            i
            for i, token in enumerate(canvas)
            if token != MASK and editable[i] and p[i] > edit_threshold and x0[i] != token
        ]
        canvas = [x0[i] if i in fill or i in edit else token for i, token in enumerate(canvas)]
        yield canvas
        if not masked and not edit:
            return


@given(
    seed=st.integers(0, 10**6),
    sharpness=st.floats(0.3, 6),
    prompt=st.integers(0, C - 1),
    threshold=st.floats(0, 1),
    edit_threshold=st.floats(0, 1),
    max_post_steps=st.integers(0, POST),
    min_transfer=st.integers(1, 3),
)
def test_is_the_published_rule(run_decoder, no_draws, seed, sharpness, prompt, **settings):
    stats = random_stats(seed, sharpness)
    fixed, editable = torch.arange(C)[None] % MASK, torch.arange(C)[None] >= prompt
    states = run_decoder(DraftEdit(MASK, C, **settings), lambda k, state: stats[k], fixed, editable, no_draws)
    start = [token if i < prompt else MASK for i, token in enumerate(fixed[0].tolist())]
    expected = [start, *reference_block(start, editable[0].tolist(), stats, **settings)]
    assert [state.canvas[0].tolist() for state in states] == expected
    assert states[-1].unresolved.sum() == 0


def test_the_random_cases_edit_settle_and_run_out_of_budget(run_decoder, no_draws):
    """Guards the test above: its inputs reach all three ends."""
    decoder, ends = DraftEdit(MASK, C, 0.7, 0.3, max_post_steps=POST), set()
    fixed, editable = torch.zeros(1, C, dtype=torch.int64), torch.ones(1, C, dtype=torch.bool)
    for seed in range(20):
        stats = random_stats(seed, 3.0)
        states = run_decoder(decoder, lambda k, state, stats=stats: stats[k], fixed, editable, no_draws)
        post = states[-1].post_steps.item()
        edited = states[-1].canvas.ne(states[-2].canvas).any().item()
        ends.add("settled" if not edited else "budget")
        ends |= {"edited"} if post > 1 else set()
        assert post <= POST
    assert ends == {"settled", "budget", "edited"}


@pytest.mark.parametrize(
    "run", ["q_b32", "s_b32", "def_b32", "q_b8", "q_b16_n3", "s_b8_post0", "eos_b8", "eos_early_b8"]
)
def test_reproduces_a_recorded_llada21_run(load_golden, replay, run):
    golden, settings = load_golden("llada2_runs")
    config = settings[f"generate21/{run}"]
    decoder = DraftEdit(
        config["mask_id"],
        config["block_length"],
        config["threshold"],
        config["editing_threshold"],
        config["max_post_steps"],
        config.get("num_to_transfer", 1),
    )
    assert replay(decoder, golden, f"generate21/{run}") == config["num_forwards"]


def test_a_probability_at_the_edit_threshold_does_not_exceed_it(no_draws):
    decoder, block = DraftEdit(MASK, 3, threshold=0.5, edit_threshold=0.25), torch.zeros(1, dtype=torch.int64)
    canvas = torch.zeros(1, 3, dtype=torch.int64)
    drafted = replace(decoder.init(canvas, canvas == 0, no_draws, block), canvas=canvas, unresolved=canvas > 0)
    token, p = torch.tensor([[1, 2, 3]]), torch.tensor([[0.25, 0.5, 0.25]])
    after = decoder.step(TokenStats(token, token, p, p, torch.zeros(1, 3)), drafted, no_draws, block)
    assert after.canvas.tolist() == [[0, 2, 0]]


@pytest.mark.parametrize("post", [0, 3])
def test_stops_even_where_the_mask_token_is_predicted_or_edits_never_end(run_decoder, no_draws, post):
    decoder = DraftEdit(MASK, C, threshold=1.0, edit_threshold=0.0, max_post_steps=post)
    fixed, editable = torch.zeros(1, C, dtype=torch.int64), torch.ones(1, C, dtype=torch.bool)

    def stats_of_step(k, state):
        logits = torch.zeros(1, C, V)
        logits[..., MASK if k % 2 else 0] = 5.0
        return token_stats(logits)

    states = run_decoder(decoder, stats_of_step, fixed, editable, no_draws)
    assert len(states) == 1 + C + post == 1 + decoder.max_steps


def test_a_finished_row_is_frozen_while_others_go_on(run_decoder, no_draws):
    decoder = DraftEdit(MASK, C, threshold=0.9, edit_threshold=0.5)
    fixed, editable = torch.zeros(2, C, dtype=torch.int64), torch.ones(2, C, dtype=torch.bool)

    def stats_of_step(k, state):
        logits = torch.zeros(2, C, V)
        logits[0, :, min(k, 1)] = 20.0  # drafts 0, edits to 1, settles
        logits[0, :, 2] += 50.0 * (k > 3)  # would edit again if it were not frozen
        logits[1, torch.arange(C), torch.arange(C) % MASK] = 1.0  # one position a step
        return token_stats(logits)

    states = run_decoder(decoder, stats_of_step, fixed, editable, no_draws)
    assert states[-1].step.tolist() == [3, C + 1]
    assert states[-1].canvas[0].tolist() == [1] * C
    assert states[-1].canvas[1].tolist() == [i % MASK for i in range(C)]


def test_temperature_and_greedy_follow_the_sampling_temperature(no_draws):
    fixed, editable = torch.zeros(2, C, dtype=torch.int64), torch.ones(2, C, dtype=torch.bool)
    for setting, greedy, temperature in ((0.0, True, 1.0), (0.5, False, 0.5)):
        decoder = DraftEdit(MASK, C, sampling_temperature=setting)
        assert decoder.greedy is greedy
        state = decoder.init(fixed, editable, no_draws, torch.zeros(2, dtype=torch.int64))
        assert decoder.temperature(state).tolist() == [temperature] * 2


def test_a_step_needs_no_value_from_the_device(no_draws):
    decoder = DraftEdit(MASK, C)
    block = torch.zeros(2, dtype=torch.int64, device="meta")
    fixed = torch.zeros(2, C, dtype=torch.int64, device="meta")
    state = decoder.init(fixed, torch.ones(2, C, dtype=torch.bool, device="meta"), no_draws, block)
    logits = torch.zeros(2, C, V, device="meta") / decoder.temperature(state)[:, None, None]
    after = decoder.step(token_stats(logits), state, no_draws, block)
    assert (decoder.result(after).shape, after.done.shape) == ((2, C), (2,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": -0.5}, "threshold is -0.5"),
        ({"edit_threshold": 2.0}, "edit_threshold is 2.0"),
        ({"canvas_length": 0}, "canvas_length is 0"),
        ({"max_post_steps": -1}, "max_post_steps is -1"),
        ({"min_transfer": 0}, "min_transfer is 0"),
        ({"sampling_temperature": -1.0}, "sampling_temperature is -1.0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        DraftEdit(**({"mask_id": MASK, "canvas_length": C} | settings))


def test_a_block_longer_than_the_canvas_is_refused(no_draws):
    fixed = torch.zeros(1, C + 1, dtype=torch.int64)
    with pytest.raises(ShapeError, match=f"{C + 1} positions"):
        DraftEdit(MASK, C).init(fixed, fixed == 0, no_draws, torch.zeros(1, dtype=torch.int64))

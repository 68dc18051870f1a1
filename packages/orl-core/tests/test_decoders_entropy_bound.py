"""Entropy-bound decoding against transformers' sampler, schedule and stopping rule, and against recorded runs."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
    StableAndConfidentStoppingCriteria,
)

from orl_core.decoders import EntropyBound
from orl_core.entropy import token_stats
from orl_core.errors import ConfigError
from orl_core.rng import CounterRng

B, C, V, STEPS = 4, 6, 11, 8


def random_run(seed: int):
    """Logits [S, B, C, V] that sharpen over the steps, each row at its own pace, and all draws."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(B, C, V, generator=generator)
    pace = torch.rand(B, 1, 1, generator=generator) * 12
    noise = torch.randn(STEPS, B, C, V, generator=generator)
    step = torch.arange(STEPS).view(-1, 1, 1, 1)
    logits = truth * (1 + pace * step) + noise
    candidates = torch.distributions.Categorical(logits=torch.randn(STEPS, B, C, V, generator=generator)).sample()
    canvas = torch.randint(V, (B, C), generator=generator)
    renoise = torch.randint(V, (STEPS, B, C), generator=generator)
    return logits, candidates, canvas, renoise


def reference_run(logits, candidates, canvas, renoise, bound, t_min, t_max, stability, confidence, greedy):
    """The inner loop of DiffusionGemmaGenerationMixin._denoising_step with the model and the draws replaced.

    Yields (next canvas, argmax canvas, finished) after each step; rows that have finished keep what they had.
    """
    sampler = EntropyBoundSampler(EntropyBoundSamplerConfig(bound), C, V, STEPS)
    schedule = LinearTemperatureScheduleLogitsProcessor(t_min, t_max, STEPS)
    stopping = StableAndConfidentStoppingCriteria(stability, confidence)
    finished, argmax = torch.zeros(B, dtype=torch.bool), torch.zeros_like(canvas)
    for k in range(STEPS):
        remaining = torch.tensor(STEPS - k, dtype=torch.int32)
        processed = schedule(None, logits[k], cur_step=remaining)
        sampler.initialize_canvas = lambda batch_size, device, k=k: renoise[k]
        new_argmax = processed.argmax(-1)
        accepted = sampler.accept_canvas(canvas, new_argmax if greedy else candidates[k], processed, remaining)
        argmax = torch.where(finished[:, None], argmax, new_argmax)
        canvas = torch.where(finished[:, None], canvas, sampler.renoise_canvas(accepted, remaining))
        finished = finished | stopping(argmax, processed)
        yield canvas, argmax, finished
        if finished.all():
            return


def stats_from(decoder, logits, candidates):
    """Statistics of step k as an engine computes them: divided by the decoder's temperature, candidate given."""

    def stats_of_step(k, state):
        processed = logits[k] / decoder.temperature(state)[:, None, None]
        return token_stats(processed, None if decoder.greedy else candidates[k])

    return stats_of_step


def compare_with_transformers(run_decoder, recorded_draws, seed, greedy, **settings):
    logits, candidates, canvas, renoise = random_run(seed)
    decoder = EntropyBound(V, max_steps=STEPS, greedy=greedy, **settings)
    draws, editable = recorded_draws(canvas, renoise), torch.ones(B, C, dtype=torch.bool)
    states = run_decoder(decoder, stats_from(decoder, logits, candidates), torch.zeros_like(canvas), editable, draws)
    assert torch.equal(states[0].canvas, canvas)
    expected = list(
        reference_run(
            logits,
            candidates,
            canvas,
            renoise,
            settings["entropy_bound"],
            settings["t_min"],
            settings["t_max"],
            settings["stability_threshold"],
            settings["confidence_threshold"],
            greedy,
        )
    )
    assert len(states) == 1 + len(expected)
    for k, (state, (want_canvas, want_argmax, finished)) in enumerate(zip(states[1:], expected, strict=True)):
        assert torch.equal(state.canvas, want_canvas)
        assert torch.equal(decoder.result(state), want_argmax)
        assert torch.equal(state.done, finished | torch.tensor(k + 1 == STEPS))
    return states[-1].step


@given(
    seed=st.integers(0, 10**6),
    greedy=st.booleans(),
    entropy_bound=st.floats(0.01, 3),
    t_min=st.floats(0.3, 1),
    t_range=st.floats(0.01, 1),
    stability_threshold=st.integers(0, 2),
    confidence_threshold=st.floats(0.01, 1),
)
def test_equals_transformers_step_by_step(run_decoder, recorded_draws, seed, greedy, t_min, t_range, **settings):
    compare_with_transformers(run_decoder, recorded_draws, seed, greedy, t_min=t_min, t_max=t_min + t_range, **settings)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("stability", [0, 1, 2])
def test_equals_transformers_where_rows_stop_at_different_steps(run_decoder, recorded_draws, greedy, stability):
    steps = compare_with_transformers(
        run_decoder,
        recorded_draws,
        12,
        greedy,
        entropy_bound=0.2,
        t_min=0.4,
        t_max=0.8,
        stability_threshold=stability,
        confidence_threshold=0.1,
    )
    assert len(set(steps.tolist())) >= 3, "the case must exercise rows that finish at different steps"
    assert steps.min() < STEPS


def test_temperature_is_that_of_transformers():
    decoder = EntropyBound(V, max_steps=48, t_min=0.4, t_max=0.8)
    schedule = LinearTemperatureScheduleLogitsProcessor(0.4, 0.8, 48)
    zero = torch.zeros(1, dtype=torch.int64)
    state = decoder.init(torch.zeros(1, 1).long(), torch.ones(1, 1).bool(), CounterRng(zero), zero)
    for step in range(48):
        scores = torch.tensor([2.0])
        want = schedule(None, scores, cur_step=torch.tensor(48 - step, dtype=torch.int32))
        assert torch.equal(scores / decoder.temperature(replace(state, step=torch.tensor([step]))), want)


@pytest.mark.parametrize("run", ["generate_a", "generate_c"])
def test_reproduces_a_recorded_diffusion_gemma_run(load_golden, run_decoder, recorded_draws, run):
    golden, settings = load_golden("diffusion_gemma_runs")
    config = settings[run]
    decoder = EntropyBound(
        256,
        entropy_bound=config["entropy_bound"],
        max_steps=config["max_denoising_steps"],
        t_min=config["t_min"],
        t_max=config["t_max"],
        stability_threshold=config["stability_threshold"],
        confidence_threshold=config["confidence_threshold"],
        greedy=False,
    )
    record = {k.removeprefix(f"{run}/"): v for k, v in golden.items() if k.startswith(f"{run}/")}
    for canvas, steps in enumerate(config["steps_per_canvas"]):
        own = record["step_canvas_index"] == canvas
        rec = {k: v[own] for k, v in record.items() if k != "draw_init_canvas"}
        draws = recorded_draws(record["draw_init_canvas"][canvas], rec["draw_renoise"])
        stats = stats_from(decoder, rec["step_raw_logits"], rec["draw_multinomial"])
        editable = torch.ones_like(draws.canvas, dtype=torch.bool)
        states = run_decoder(decoder, stats, torch.zeros_like(draws.canvas), editable, draws)
        assert len(states) == 1 + steps
        finished = rec["step_finished"].int().cumsum(0).bool()
        for k, (before, after) in enumerate(pairwise(states)):
            live = ~before.done
            assert torch.equal(before.canvas, rec["step_input_canvas"][k])
            assert torch.equal(after.answer, rec["step_argmax_canvas"][k])
            assert torch.equal(~after.unresolved[live], rec["step_accept_mask"][k][live])
            accepted = ~after.unresolved & live[:, None]
            assert torch.equal(after.canvas[accepted], rec["step_accepted_canvas"][k][accepted])
            assert torch.equal(after.done, finished[k] | torch.tensor(k + 1 == decoder.max_steps))
            torch.testing.assert_close(
                stats(k, before).entropy[live], rec["step_processed_entropy"][k][live], rtol=0, atol=1e-5
            )


@given(st.integers(0, 10**6), st.integers(0, C - 1))
def test_prompt_tokens_in_the_block_change_nothing_for_the_rest(run_decoder, recorded_draws, seed, prompt):
    """A block that begins with prompt tokens decodes as a canvas of only its other positions."""
    logits, candidates, canvas, renoise = random_run(seed)
    decoder = EntropyBound(V, max_steps=STEPS, confidence_threshold=0.1, entropy_bound=0.3, greedy=False)
    fixed = torch.full((B, C), V - 1)
    editable = (torch.arange(C) >= prompt).expand(B, C)
    whole = run_decoder(
        decoder, stats_from(decoder, logits, candidates), fixed, editable, recorded_draws(canvas, renoise)
    )
    part = run_decoder(
        decoder,
        stats_from(decoder, logits[:, :, prompt:], candidates[:, :, prompt:]),
        fixed[:, prompt:],
        editable[:, prompt:],
        recorded_draws(canvas[:, prompt:], renoise[:, :, prompt:]),
    )
    assert len(whole) == len(part)
    for a, b in zip(whole, part, strict=True):
        assert (a.canvas[:, :prompt] == V - 1).all()
        assert (decoder.result(a)[:, :prompt] == V - 1).all()
        assert not a.unresolved[:, :prompt].any()
        assert torch.equal(a.canvas[:, prompt:], b.canvas)
        assert torch.equal(decoder.result(a)[:, prompt:], decoder.result(b))
        assert torch.equal(a.done, b.done)


def test_a_row_without_editable_positions_is_done_at_once():
    decoder, zero = EntropyBound(V), torch.zeros(2, dtype=torch.int64)
    editable = torch.tensor([[False, False], [False, True]])
    state = decoder.init(torch.full((2, 2), 3), editable, CounterRng(zero), zero)
    assert state.done.tolist() == [True, False]
    assert state.canvas[0].tolist() == [3, 3]


@given(st.lists(st.floats(0, 2, width=32), min_size=1, max_size=8), st.floats(0, 3))
def test_accepts_the_lowest_entropies_while_the_sum_of_the_others_is_bounded(entropies, bound):
    accepted = EntropyBound(V, entropy_bound=bound).accept(torch.tensor([entropies]))[0].tolist()
    expected, before = [False] * len(entropies), torch.tensor(0.0)
    for i in sorted(range(len(entropies)), key=lambda i: (entropies[i], i)):
        total = before + torch.tensor(entropies[i])
        expected[i] = bool(total - torch.tensor(entropies[i]) <= bound)
        before = total
    assert accepted == expected
    assert any(accepted), "the most certain position is always accepted"


def test_equal_entropies_are_accepted_in_order_of_position():
    assert EntropyBound(V, entropy_bound=0.5).accept(torch.full((1, 300), 0.25))[0].nonzero().flatten().tolist() == [
        0,
        1,
        2,
    ]


def test_a_canvas_that_starts_as_the_answer_is_not_yet_stable(run_decoder, recorded_draws):
    """Stability compares predictions with predictions: two are needed, whatever noise the canvas began with."""
    decoder, answer = EntropyBound(V, stability_threshold=1), torch.full((B, C), 3)
    draws, editable = recorded_draws(answer, answer[None]), torch.ones(B, C, dtype=torch.bool)
    stats = token_stats(50.0 * torch.nn.functional.one_hot(answer, V))
    assert len(run_decoder(decoder, lambda k, state: stats, answer, editable, draws)) == 1 + 2


def test_stops_at_max_steps_without_ever_being_confident(run_decoder, recorded_draws):
    decoder = EntropyBound(V, max_steps=STEPS)
    logits, candidates, canvas, renoise = random_run(0)
    flat = torch.zeros_like(logits)
    draws, editable = recorded_draws(canvas, renoise), torch.ones(B, C, dtype=torch.bool)
    states = run_decoder(decoder, stats_from(decoder, flat, candidates), canvas, editable, draws)
    assert len(states) == 1 + STEPS


def test_the_canvas_starts_from_the_seed_and_the_block(run_decoder):
    decoder, editable = EntropyBound(V), torch.ones(1, C, dtype=torch.bool)

    def canvas(seed, block):
        draws = CounterRng(torch.tensor([seed]))
        return decoder.init(torch.zeros(1, C).long(), editable, draws, torch.tensor([block])).canvas.tolist()

    assert canvas(1, 0) == canvas(1, 0)
    assert canvas(1, 0) != canvas(1, 1)
    assert canvas(1, 0) != canvas(2, 0)


def test_a_step_needs_no_value_from_the_device():
    decoder = EntropyBound(V, stability_threshold=2)
    block = torch.zeros(B, dtype=torch.int64, device="meta")
    fixed = torch.zeros(B, C, dtype=torch.int64, device="meta")
    draws = CounterRng(block)
    state = decoder.init(fixed, torch.ones(B, C, dtype=torch.bool, device="meta"), draws, block)
    logits = torch.zeros(B, C, V, device="meta") / decoder.temperature(state)[:, None, None]
    after = decoder.step(token_stats(logits), state, draws, block)
    assert {(t.shape, t.dtype) for t in (after.canvas, decoder.result(after))} == {(fixed.shape, torch.int64)}
    assert after.done.shape == (B,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"stability_threshold": -1}, "stability_threshold is -1"),
        ({"entropy_bound": -0.1}, "entropy_bound is -0.1"),
        ({"entropy_bound": float("nan")}, "entropy_bound is nan"),
        ({"confidence_threshold": 0.0}, "confidence_threshold is 0.0"),
        ({"t_min": 0.0}, "t_min is 0.0"),
        ({"t_min": 0.8, "t_max": 0.4}, "t_min is 0.8 and t_max 0.4"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EntropyBound(**({"vocab_size": V} | settings))


def test_answer_prob_is_that_of_the_last_step(run_decoder, recorded_draws):
    logits, candidates, canvas, renoise = random_run(3)
    decoder = EntropyBound(V, max_steps=STEPS, greedy=False)
    editable = (torch.arange(C) > 0).expand(B, C)
    stats_of_step = stats_from(decoder, logits, candidates)
    states = run_decoder(decoder, stats_of_step, canvas, editable, recorded_draws(canvas, renoise))
    for row, last in enumerate(states[-1].step.tolist()):
        top = stats_of_step(last - 1, states[last - 1]).top_prob[row]
        assert states[-1].answer_prob[row].tolist() == [1.0, *top[1:].tolist()]

"""Insert-and-delete decoding against a plain loop over lists."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orl_core.decoders import DraftEdit, InsertDelete
from orl_core.entropy import TokenStats, token_stats
from orl_core.errors import ConfigError, ShapeError

C, V, POST = 6, 10, 4
MASK, DELETE, INSERT = 7, 8, 9
IDS = {"mask_id": MASK, "canvas_length": C, "delete_id": DELETE, "insert_id": INSERT}


def random_stats(seed: int, sharpness: float, state):
    """Statistics of one row that depend on the canvas and favour it, with control tokens suppressed at masks."""
    own = hash((seed, *state.canvas[0].tolist())) % 2**31
    generator = torch.Generator().manual_seed(own)
    logits = torch.randn(1, C, V, generator=generator) * sharpness
    logits.scatter_add_(-1, state.canvas[..., None], torch.full((1, C, 1), sharpness))
    logits[..., MASK] = -torch.inf
    logits[..., DELETE:] = logits[..., DELETE:].masked_fill(state.unresolved[..., None], -torch.inf)
    return token_stats(logits)


def reference_step(canvas, prob, editable, post_steps, stats, threshold, edit_threshold, max_post_steps, min_transfer):
    """One forward on one row: (canvas, probabilities, post steps, done)."""
    x0, p = stats.candidate[0].tolist(), stats.candidate_prob[0].tolist()
    masked = [i for i, token in enumerate(canvas) if editable[i] and token == MASK]
    fill = [i for i in masked if p[i] > threshold]
    if len(fill) < min_transfer:
        fill = sorted(masked, key=lambda i: (-p[i], i))[:min_transfer]
    items, changed = [], False
    for i in (i for i in range(C) if editable[i]):
        if i in masked:
            items.append((x0[i], p[i]) if i in fill else (MASK, 1.0))
        elif p[i] <= edit_threshold or x0[i] == canvas[i]:
            items.append((canvas[i], prob[i]))
        elif x0[i] in (DELETE, INSERT):
            if masked or post_steps >= max_post_steps:
                items.append((canvas[i], prob[i]))
                continue
            changed = True
            items += [] if x0[i] == DELETE else [(MASK, 1.0), (canvas[i], prob[i])]
        else:
            changed = True
            items.append((x0[i], p[i]))
    length, first = sum(editable), editable.index(True)
    items = (items + [(MASK, 1.0)] * length)[:length]
    new_canvas = canvas[:first] + [token for token, _ in items] + canvas[first + length :]
    new_prob = prob[:first] + [value for _, value in items] + prob[first + length :]
    post_steps += not masked
    filled = MASK not in [token for token, _ in items]
    return new_canvas, new_prob, post_steps, (not masked and not changed) or (filled and post_steps >= max_post_steps)


@given(
    seed=st.integers(0, 10**6),
    sharpness=st.floats(0.3, 6),
    prompt=st.integers(0, C - 1),
    missing=st.integers(0, C),
    threshold=st.floats(0, 1),
    edit_threshold=st.floats(0, 1),
    max_post_steps=st.integers(0, POST),
    min_transfer=st.integers(1, 3),
)
def test_is_the_published_rule(run_decoder, no_draws, seed, sharpness, prompt, missing, **settings):
    place = torch.arange(C)[None]
    fixed, editable = place % MASK, (place >= prompt) & (place < max(prompt + 1, C - missing))
    decoder = InsertDelete(**IDS, **settings)
    states = run_decoder(decoder, lambda k, state: random_stats(seed, sharpness, state), fixed, editable, no_draws)
    mask = editable[0].tolist()
    canvas = [MASK if mask[i] else token for i, token in enumerate(fixed[0].tolist())]
    prob, post_steps, done = [1.0] * C, 0, False
    for before, after in pairwise(states):
        assert not done
        stats = random_stats(seed, sharpness, before)
        canvas, prob, post_steps, done = reference_step(canvas, prob, mask, post_steps, stats, **settings)
        assert after.canvas[0].tolist() == canvas
        assert after.answer_prob[0].tolist() == prob
        assert after.unresolved[0].tolist() == [mask[i] and canvas[i] == MASK for i in range(C)]
    assert done
    result = decoder.result(states[-1])[0].tolist()
    assert not {MASK, DELETE, INSERT} & set(result[prompt : prompt + sum(mask)])


def test_the_random_cases_insert_and_delete(run_decoder, no_draws):
    """Guards the test above: its inputs reach both control tokens and both ends."""
    fixed, editable, seen = torch.zeros(1, C, dtype=torch.int64), torch.ones(1, C, dtype=torch.bool), set()
    for seed in range(20):
        decoder = InsertDelete(**IDS, threshold=0.5, edit_threshold=0.2 + 0.6 * (seed % 2), max_post_steps=POST)
        states = run_decoder(decoder, lambda k, state, s=seed: random_stats(s, 3.0, state), fixed, editable, no_draws)
        for state in states[:-1]:
            if not state.unresolved.any():
                seen |= set(random_stats(seed, 3.0, state).candidate[0].tolist())
        seen.add("settled" if states[-1].canvas.eq(states[-2].canvas).all() else "budget")
    assert {DELETE, INSERT, "settled", "budget"} <= seen


def predict(tokens, p=0.99):
    token, prob = torch.tensor([tokens]), torch.full((1, len(tokens)), p)
    return TokenStats(token, token, prob, prob, torch.zeros_like(prob))


@pytest.mark.parametrize(
    ("second", "canvas"),
    [
        ([0, DELETE, 2, 3, 4, 5], [0, 2, 3, 4, 5, MASK]),
        ([0, INSERT, 2, 3, 4, 5], [0, MASK, 1, 2, 3, 4]),
        ([DELETE, DELETE, 6, 3, 4, INSERT], [6, 3, 4, MASK, 5, MASK]),
        ([INSERT] * 6, [MASK, 0, MASK, 1, MASK, 2]),
        ([DELETE] * 6, [MASK] * 6),
        ([0, 1, 2, 3, 4, INSERT], [0, 1, 2, 3, 4, MASK]),
    ],
)
def test_tokens_move(no_draws, second, canvas):
    decoder, block = InsertDelete(**IDS), torch.zeros(1, dtype=torch.int64)
    fixed = torch.zeros(1, C, dtype=torch.int64)
    state = decoder.init(fixed, fixed == 0, no_draws, block)
    state = decoder.step(predict([0, 1, 2, 3, 4, 5]), state, no_draws, block)
    state = decoder.step(predict(second), state, no_draws, block)
    assert state.canvas[0].tolist() == canvas
    assert state.unresolved[0].tolist() == [token == MASK for token in canvas]
    assert not state.done


def test_without_control_tokens_it_is_draft_and_edit(run_decoder, no_draws):
    fixed, editable = torch.arange(C)[None], torch.arange(C)[None] >= 2
    settings = {"threshold": 0.6, "edit_threshold": 0.2, "max_post_steps": 3}
    logits = torch.randn(60, 1, C, V, generator=torch.Generator().manual_seed(1)) * 3
    logits[..., MASK:] = -torch.inf
    runs = [
        run_decoder(decoder, lambda k, state: token_stats(logits[k]), fixed, editable, no_draws)
        for decoder in (DraftEdit(MASK, C, **settings), InsertDelete(**IDS, **settings))
    ]
    assert len(runs[0]) == len(runs[1]) > C - 1
    for one, other in zip(*runs, strict=True):
        for name in ("canvas", "unresolved", "answer_prob", "post_steps", "done"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("token", [INSERT, DELETE])
def test_stops_within_its_bound_whatever_is_predicted(run_decoder, no_draws, token):
    decoder = InsertDelete(**IDS, threshold=1.0, edit_threshold=0.0, max_post_steps=POST)
    fixed, editable = torch.zeros(1, C, dtype=torch.int64), torch.ones(1, C, dtype=torch.bool)

    def stats_of_step(k, state):
        return predict([0 if masked else token for masked in state.unresolved[0].tolist()])

    states = run_decoder(decoder, stats_of_step, fixed, editable, no_draws)
    assert set(states[-1].canvas[0].tolist()) == {0}
    if token == DELETE:
        assert len(states) == 1 + decoder.max_steps
    stuck = run_decoder(decoder, lambda k, state: predict([token] * C), fixed, editable, no_draws)
    assert len(stuck) == 1 + decoder.max_steps


def test_a_step_needs_no_value_from_the_device(no_draws):
    decoder = InsertDelete(**IDS)
    block = torch.zeros(2, dtype=torch.int64, device="meta")
    fixed = torch.zeros(2, C, dtype=torch.int64, device="meta")
    state = decoder.init(fixed, torch.ones(2, C, dtype=torch.bool, device="meta"), no_draws, block)
    logits = torch.zeros(2, C, V, device="meta") / decoder.temperature(state)[:, None, None]
    after = decoder.step(token_stats(logits), state, no_draws, block)
    assert (decoder.result(after).shape, after.done.shape) == ((2, C), (2,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delete_id": MASK}, "three different tokens"),
        ({"insert_id": DELETE}, "three different tokens"),
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
        InsertDelete(**(IDS | settings))


def test_a_block_longer_than_the_canvas_is_refused(no_draws):
    fixed = torch.zeros(1, C + 1, dtype=torch.int64)
    with pytest.raises(ShapeError, match=f"{C + 1} positions"):
        InsertDelete(**IDS).init(fixed, fixed == 0, no_draws, torch.zeros(1, dtype=torch.int64))

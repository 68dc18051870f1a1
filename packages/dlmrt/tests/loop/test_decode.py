"""Decoding through cache, static buffers and driver is token-identical to the plain reference."""

import pytest
import torch

from dlmrt.engine import Engine
from dlmrt.loop.decode import cache_capacity, first_start
from orl_core.decoders import DraftEdit, EntropyBound, Threshold

VOCAB, MASK, CANVAS = 264, 258, 8
RUN = 5e-4  # tolerance over a run: each step amplifies the rounding of the one before
UNIFORM = {"state_family": "uniform", "mask_token_id": None}
MASKED = {"state_family": "masked", "mask_token_id": MASK}
SDAR = {**MASKED, "model_type": "sdar", "block_size": CANVAS, "residual_intermediate_size": 0}

CASES = {
    "entropy_bound": (UNIFORM, EntropyBound(VOCAB, entropy_bound=2.0, max_steps=10, confidence_threshold=2.2)),
    "entropy_bound-scheduled-sampled": (
        UNIFORM,
        EntropyBound(VOCAB, entropy_bound=3.0, max_steps=6, t_min=0.4, t_max=0.8, greedy=False),
    ),
    "threshold": (MASKED, Threshold(MASK, CANVAS, threshold=0.3)),
    "threshold-schedule": (MASKED, Threshold(MASK, CANVAS, threshold=0.5, steps=3)),
    "threshold-sampled": (MASKED, Threshold(MASK, CANVAS, threshold=0.3, sampling_temperature=0.7)),
    "draft_edit": (MASKED, DraftEdit(MASK, CANVAS, threshold=0.25, edit_threshold=0.15, max_post_steps=5)),
    "draft_edit-transfer": (MASKED, DraftEdit(MASK, CANVAS, threshold=0.9, edit_threshold=0.3, min_transfer=3)),
    "aligned-threshold": (SDAR, Threshold(MASK, CANVAS, threshold=0.3)),
    "aligned-draft_edit": (SDAR, DraftEdit(MASK, CANVAS, threshold=0.25, edit_threshold=0.15, max_post_steps=5)),
}


def prompt_of(length, seed=3):
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def build(tiny_config, tiny_tensors, reference):
    """(engine, reference) over the same random model."""

    def both(overrides, stop_ids=(), seed=0):
        raw = tiny_config(**overrides)
        tensors = tiny_tensors(raw, seed)
        return Engine.from_state(raw, tensors, generation={"eos_token_id": list(stop_ids)}), reference(raw, tensors)

    return both


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_states_equal_the_reference(build, case, residual):
    overrides, decoder = CASES[case]
    engine, reference = build(overrides)
    prompt = prompt_of(11)
    expected = reference(prompt.tolist(), decoder, max_new_tokens=20, seed=5, residual=residual)
    (got,) = engine.rollout([prompt], decoder, max_new_tokens=20, seeds=[5], residual=residual)
    assert got.response_ids.tolist() == expected.tokens
    assert [block.steps for block in got.blocks] == expected.steps
    has_z = residual and engine.model.spec.has_residual
    for block, states in zip(got.blocks, expected.states, strict=True):
        for step, (canvas, z, unresolved) in enumerate(states):
            assert block.canvas[step].tolist() == canvas
            assert block.unresolved[step].tolist() == unresolved
            expected_z = torch.zeros(CANVAS, 32) if z is None or not has_z else z
            torch.testing.assert_close(block.z[step], expected_z, atol=RUN, rtol=0)


def test_the_residual_changes_the_tokens(build):
    overrides, decoder = CASES["entropy_bound"]
    engine, _ = build(overrides)
    runs = [
        engine.rollout([prompt_of(5)], decoder, max_new_tokens=20, seeds=[0], residual=residual)[0]
        for residual in (True, False)
    ]
    assert runs[0].response_ids.tolist() != runs[1].response_ids.tolist()


@pytest.mark.parametrize("case", ["entropy_bound", "aligned-threshold"])
@pytest.mark.parametrize("length", range(1, 2 * CANVAS + 2))
def test_prompts_of_every_length_modulo_the_block(build, case, length):
    overrides, decoder = CASES[case]
    engine, reference = build(overrides)
    prompt = prompt_of(length)
    (got,) = engine.rollout([prompt], decoder, max_new_tokens=10, seeds=[1], capture=False)
    expected = reference(prompt.tolist(), decoder, max_new_tokens=10, seed=1)
    assert got.response_ids.tolist() == expected.tokens
    assert [block.steps for block in got.blocks] == expected.steps


@pytest.mark.parametrize("case", CASES)
def test_rows_of_a_batch_equal_single_runs(build, case):
    overrides, decoder = CASES[case]
    engine, _ = build(overrides, stop_ids=range(0, 40))
    prompts, seeds = [prompt_of(n, seed=n) for n in (1, 7, 8, 20, 13)], [4, 4, 5, 6, 7]
    together = engine.rollout(prompts, decoder, max_new_tokens=30, seeds=seeds)
    assert len({len(row.blocks) for row in together}) > 1
    for prompt, seed, row in zip(prompts, seeds, together, strict=True):
        (alone,) = engine.rollout([prompt], decoder, max_new_tokens=30, seeds=[seed])
        assert row.response_ids.tolist() == alone.response_ids.tolist()
        assert row.finish_reason == alone.finish_reason
        assert torch.equal(row.prompt_ids, prompt)
        for ours, theirs in zip(row.blocks, alone.blocks, strict=True):
            assert (ours.start, ours.block, ours.steps) == (theirs.start, theirs.block, theirs.steps)
            assert torch.equal(ours.tokens, theirs.tokens)
            assert torch.equal(ours.canvas, theirs.canvas)
            assert torch.equal(ours.unresolved, theirs.unresolved)
            torch.testing.assert_close(ours.z, theirs.z, atol=RUN, rtol=0)
            torch.testing.assert_close(ours.entropy, theirs.entropy, atol=RUN, rtol=0)
            torch.testing.assert_close(ours.top_prob, theirs.top_prob, atol=RUN, rtol=0)


def test_seeds_of_equal_prompts_give_different_rows(build):
    overrides, decoder = CASES["entropy_bound"]
    engine, _ = build(overrides)
    rows = engine.rollout([prompt_of(5)] * 3, decoder, max_new_tokens=16, seeds=[1, 2, 1])
    first, second, third = (row.response_ids.tolist() for row in rows)
    assert first == third != second


@pytest.mark.parametrize("case", ["entropy_bound", "threshold-schedule", "aligned-draft_edit"])
@pytest.mark.parametrize("length", [81, 85, 90, 95])
def test_last_canvas_ends_with_the_context(build, case, length):
    overrides, decoder = CASES[case]
    engine, reference = build(overrides)
    prompt, left = prompt_of(length), 96 - length
    (got,) = engine.rollout([prompt], decoder, max_new_tokens=left, seeds=[2])
    expected = reference(prompt.tolist(), decoder, max_new_tokens=left, seed=2)
    assert got.response_ids.tolist() == expected.tokens
    assert len(got.response_ids) == left
    assert got.blocks[-1].start + len(got.blocks[-1].tokens) == 96


def test_short_last_canvas_in_a_batch_equals_the_single_run(build):
    overrides, decoder = CASES["entropy_bound"]
    engine, _ = build(overrides)
    prompts = [prompt_of(84), prompt_of(3)]
    rows = engine.rollout(prompts, decoder, max_new_tokens=12, seeds=[2, 3])
    for prompt, seed, row in zip(prompts, [2, 3], rows, strict=True):
        (alone,) = engine.rollout([prompt], decoder, max_new_tokens=12, seeds=[seed])
        assert row.response_ids.tolist() == alone.response_ids.tolist()


def test_uncaptured_blocks_hold_all_but_the_states(build):
    overrides, decoder = CASES["entropy_bound"]
    engine, _ = build(overrides)
    prompts = [prompt_of(84), prompt_of(3)]
    captured, plain = (
        engine.rollout(prompts, decoder, max_new_tokens=12, seeds=[2, 3], capture=c) for c in (True, False)
    )
    for with_states, without in zip(captured, plain, strict=True):
        assert without.forwards == with_states.forwards
        assert without.tpf_commit == with_states.tpf_commit
        for a, b in zip(with_states.blocks, without.blocks, strict=True):
            assert (a.start, a.block, a.tokens.tolist()) == (b.start, b.block, b.tokens.tolist())
            assert b.canvas.shape == b.unresolved.shape == b.entropy.shape == b.top_prob.shape == (a.steps, 0)


def test_answer_ends_with_its_first_stop_token_and_nothing_is_decoded_after_it(build):
    overrides, decoder = CASES["threshold"]
    engine, reference = build(overrides, stop_ids=range(0, 30))
    (got,) = engine.rollout([prompt_of(9)], decoder, max_new_tokens=60, seeds=[0])
    expected = reference(prompt_of(9).tolist(), decoder, max_new_tokens=60, stop_ids=range(0, 30))
    tokens = got.response_ids.tolist()
    assert tokens == expected.tokens
    assert [token < 30 for token in tokens].index(True) == len(tokens) - 1
    assert got.finish_reason == "stop"
    assert len(got.blocks) == -(-len(tokens) // CANVAS)


def test_block_traces_hold_what_was_consumed_and_predicted(build):
    overrides, decoder = CASES["threshold"]
    engine, _ = build(overrides)
    (got,) = engine.rollout([prompt_of(6)], decoder, max_new_tokens=16, seeds=[0])
    assert [block.block for block in got.blocks] == [0, 1]
    assert [block.start for block in got.blocks] == [6, 14]
    for block in got.blocks:
        assert not block.z[0].any()
        assert block.z[1:].any(-1).all()
        assert block.unresolved[0].all()
        assert (block.canvas == MASK).eq(block.unresolved).all()
        assert (block.entropy > 0).all()
        assert ((block.top_prob > 0) & (block.top_prob <= 1)).all()
        assert not block.z.is_inference()
    assert got.response_ids.tolist() == torch.cat([block.tokens for block in got.blocks]).tolist()
    assert got.tpf == 16 / got.forwards


def test_mask_token_is_never_predicted(build, tiny_config, tiny_tensors):
    raw = tiny_config(**MASKED)
    tensors = tiny_tensors(raw)
    tensors["lm_head.weight"][MASK] = 0
    tensors["lm_head.weight"][MASK] = tensors["lm_head.weight"].sum(0) * 5  # the largest logit of many positions
    engine = Engine.from_state(raw, tensors)
    (got,) = engine.rollout([prompt_of(6)], CASES["threshold"][1], max_new_tokens=40, seeds=[0])
    assert MASK not in got.response_ids.tolist()


@pytest.mark.parametrize(
    ("layout", "length", "start", "capacity"),
    [("prompt_end", 5, 5, 29), ("prompt_end", 8, 8, 32), ("aligned", 5, 0, 24), ("aligned", 8, 8, 32)],
)
def test_capacity_covers_whole_canvases(tiny_engine, layout, length, start, capacity):
    spec = tiny_engine(**(SDAR if layout == "aligned" else {})).model.spec
    assert first_start(spec, length) == start
    assert cache_capacity(spec, length, 17) == capacity

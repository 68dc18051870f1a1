"""Editing across blocks, and inserting and deleting, against loops over the reference model without a cache."""

import json
from pathlib import Path

import pytest
import torch

from dlmrt import GenerationParams
from dlmrt.checkpoint.folder import parse_settings
from dlmrt.decoding import build_decoder
from dlmrt.engine import Engine
from dlmrt.errors import ModelConfigError, RequestError
from dlmrt.loop.step import suppressed_ids
from dlmrt.result import BlockCommitted, Draft
from orl_core.decoders import DraftEdit, InsertDelete
from orl_core.entropy import token_stats

MASK, CANVAS, DELETE, INSERT = 258, 8, 260, 261
MASKED = {"state_family": "masked", "mask_token_id": MASK, "residual_intermediate_size": 0}
SDAR = {**MASKED, "model_type": "sdar", "block_size": CANVAS}
EDIT = {"threshold": 0.25, "edit_threshold": 0.12, "max_post_steps": 5}


@pytest.fixture
def build(tiny_config, tiny_tensors, reference):
    def both(overrides, decoder, stop_ids=(), loud=()):
        raw = tiny_config(**overrides)
        tensors = tiny_tensors(raw)
        tensors["lm_head.weight"][list(loud)] *= 4  # tokens that are predicted often
        generation = {"eos_token_id": list(stop_ids), "decoder": decoder}
        return Engine.from_state(raw, tensors, generation=generation), reference(raw, tensors)

    return both


def edit_across_blocks(reference, prompt, decoder, edit_blocks, max_new_tokens, stop_ids):
    """(tokens, steps of each block, tokens of earlier blocks that were revised) by a plain loop."""
    cut = len(prompt) // CANVAS * CANVAS if reference.aligned else len(prompt)
    context, canvas, fixed = prompt[:cut], prompt[cut:], len(prompt) - cut
    final, steps, revised = [], [], 0
    while True:
        known = len(canvas)
        width = (known // CANVAS + 1) * CANVAS
        canvas = canvas + [MASK] * (width - known)
        unresolved, held = [i >= known for i in range(width)], [i < fixed for i in range(width)]
        before, post_steps, step = canvas[:known], 0, 0
        while True:
            logits = reference.logits(context, canvas, None, [])
            p, best = logits.softmax(-1).max(-1)
            filled = not any(unresolved)
            arguments = (decoder, step, canvas, unresolved, held, best.tolist(), p.tolist())
            canvas, edited, unresolved = reference.fill(*arguments)
            step, post_steps = step + 1, post_steps + filled
            if (filled and not edited) or (not any(unresolved) and post_steps >= decoder.max_post_steps):
                break
        steps.append(step)
        revised += sum(old != new for old, new in zip(before, canvas, strict=False))
        answer = final + canvas[fixed:]
        ends = [i for i, token in enumerate(answer) if token in stop_ids or i + 1 == max_new_tokens]
        if ends:
            return answer[: ends[0] + 1], steps, revised
        if width == (1 + edit_blocks) * CANVAS:
            final += canvas[fixed:CANVAS]
            context, canvas, fixed = context + canvas[:CANVAS], canvas[CANVAS:], 0


@pytest.mark.parametrize("overrides", [MASKED, SDAR], ids=["prompt end", "aligned"])
@pytest.mark.parametrize("edit_blocks", [1, 2])
@pytest.mark.parametrize("length", [5, 11, 16])
def test_editing_across_blocks_equals_the_plain_loop(build, overrides, edit_blocks, length):
    stop_ids = range(0, 264, 40) if length == 11 else ()
    engine, reference = build(overrides, {"name": "draft_edit", **EDIT}, stop_ids)
    prompt = torch.randint(264, (length,), generator=torch.Generator().manual_seed(3)).tolist()
    tokens, steps, revised = edit_across_blocks(
        reference, prompt, DraftEdit(MASK, CANVAS, **EDIT), edit_blocks, 37, stop_ids
    )
    params = GenerationParams(max_new_tokens=37, edit_blocks=edit_blocks, logprobs=True)
    *events, end = engine.stream(ids=prompt, params=params)
    result = end.result
    assert result.token_ids == tokens
    assert result.blocks == steps
    assert [token for event in events for token in event.token_ids] == tokens
    assert [value for event in events for value in event.logprobs] == result.logprobs
    assert max(result.logprobs) < 0
    assert not any(event.token_ids for event in events[: min(edit_blocks, len(events) - 1)])
    if not stop_ids:
        assert revised, "nothing was revised, so that the case shows nothing"


def test_drafts_of_an_edited_answer_hold_all_that_may_change(build):
    engine, _ = build(SDAR, {"name": "draft_edit", **EDIT})
    params = GenerationParams(max_new_tokens=30, edit_blocks=1)
    final: list[int] = []
    for event in engine.stream(ids=[1, 2, 3], params=params, drafts=True):
        if isinstance(event, BlockCommitted):
            final += event.token_ids
            last = event
        elif isinstance(event, Draft):
            draft = event
            assert (len(final) + len(draft.token_ids) + 3) % CANVAS == 0
        else:
            assert event.result.token_ids == final
    assert draft.token_ids[: len(last.token_ids)] == last.token_ids


def test_a_cancelled_answer_keeps_the_blocks_that_might_have_been_edited(build):
    engine, _ = build(SDAR, {"name": "draft_edit", **EDIT})
    stop = []
    params = GenerationParams(max_new_tokens=40, edit_blocks=2, logprobs=True)
    events = engine.stream(ids=[1] * 8, params=params, cancel=lambda: bool(stop))
    assert next(events).token_ids == []
    stop.append(True)
    result = list(events)[-1].result
    assert result.finish_reason == "cancelled"
    assert len(result.token_ids) == len(result.logprobs) == CANVAS


def test_editing_across_blocks_is_refused_by_other_decoders(build):
    for name in ("threshold", "insert_delete"):
        engine, _ = build(MASKED, {"name": name})
        with pytest.raises(RequestError, match=f"{name} has no edit_blocks"):
            engine.prepare(GenerationParams(edit_blocks=1), ids=[1])


# inserting and deleting


def insert_and_delete(reference, prompt, decoder, blocks):
    """(tokens, steps, control tokens that acted): orl-core's decoder over full recomputation."""
    cut = len(prompt) // CANVAS * CANVAS if reference.aligned else len(prompt)
    context, tail, steps, acted = prompt[:cut], prompt[cut:], [], 0
    for _ in range(blocks):
        fixed = torch.tensor([tail + [0] * (CANVAS - len(tail))])
        editable = torch.arange(CANVAS)[None] >= len(tail)
        state = decoder.init(fixed, editable, None, torch.zeros(1, dtype=torch.int64))
        while not state.done:
            logits = reference.logits(context, state.canvas[0].tolist(), None, [])[None]
            logits[..., [DELETE, INSERT]] = logits[..., [DELETE, INSERT]].masked_fill(
                state.unresolved[..., None], -torch.inf
            )
            after = decoder.step(token_stats(logits), state, None, None)
            acted += bool((after.unresolved & ~state.unresolved).any())
            state = after
        steps.append(state.step.item())
        context, tail = context + decoder.result(state)[0].tolist(), []
    return context[len(prompt) :], steps, acted


@pytest.mark.parametrize("overrides", [MASKED, SDAR], ids=["prompt end", "aligned"])
def test_insert_and_delete_equals_full_recomputation_and_shows_no_control_token(build, overrides):
    settings = {"threshold": 0.2, "edit_threshold": 0.02, "max_post_steps": 6}
    generation = {"name": "insert_delete", "delete_id": DELETE, "insert_id": INSERT, **settings}
    engine, reference = build(overrides, generation, loud=(DELETE, INSERT))
    acted = 0
    for seed in range(3):
        prompt = torch.randint(256, (11,), generator=torch.Generator().manual_seed(seed)).tolist()
        decoder = InsertDelete(MASK, CANVAS, DELETE, INSERT, **settings)
        tokens, steps, own = insert_and_delete(reference, prompt, decoder, 3)
        result = engine.generate(ids=prompt, params=GenerationParams(max_new_tokens=len(tokens)))
        assert result.token_ids == tokens
        assert result.blocks == steps
        assert not {MASK, DELETE, INSERT} & set(tokens)
        acted += own
    assert acted, "no control token acted, so that the case shows nothing"


def test_control_tokens_must_be_declared(build, tiny_config):
    engine, _ = build(MASKED, {"name": "threshold"})
    with pytest.raises(RequestError, match=r"delete_token_id and insert_token_id in config\.json"):
        engine.prepare(GenerationParams(decoder="insert_delete"), ids=[1])
    engine, _ = build(MASKED, {"name": "insert_delete", "delete_id": 999, "insert_id": INSERT})
    with pytest.raises(RequestError, match="delete_id = 999"):
        engine.prepare(ids=[1])


@pytest.fixture
def llada2_raw():
    return json.loads((Path(__file__).parents[1] / "golden/llada2_moe_tiny/config.json").read_text())


def test_llada2_declares_its_control_tokens_in_config_json(llada2_raw):
    plain = parse_settings(llada2_raw | {"mask_token_id": 318}, {})
    assert plain.defaults.decoder.name == "threshold"
    declared = parse_settings(llada2_raw | {"mask_token_id": 318, "delete_token_id": 310, "insert_token_id": 311}, {})
    assert declared.defaults.decoder.name == "insert_delete"
    spec = declared.config.spec
    decoder = build_decoder(spec, declared.defaults.decoder, GenerationParams())
    assert decoder == InsertDelete(318, spec.canvas_length, 310, 311)
    assert suppressed_ids(spec) == {310, 311, 318}  # other decoders must not predict them either
    with pytest.raises(ModelConfigError, match="insert_token_id"):
        parse_settings(llada2_raw | {"mask_token_id": 318, "delete_token_id": 310}, {})

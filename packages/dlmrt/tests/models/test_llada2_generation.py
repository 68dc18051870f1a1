"""LLaDA2.0 and 2.1 decoding through the engine, against the recorded runs of the reference `generate` functions."""

import pytest
import torch

from dlmrt.cache import block_causal_span
from dlmrt.engine import Engine
from dlmrt.models.llada2 import LLaDA2
from dlmrt.params import GenerationParams
from orl_core.decoders import DraftEdit

MASK = 318
RUNS_20 = ["t05_b8", "t07_b16", "t09_b32", "t095_b32_s8", "t095_b16_s12", "eos_b8", "eos_early_b8"]
RUNS_21 = ["q_b32", "s_b32", "def_b32", "q_b8", "q_b16_n3", "s_b8_post0", "eos_b8", "eos_early_b8"]


def engine_of(golden, block: int, eos_id: int | None = None, **tensors: torch.Tensor) -> Engine:
    config = golden.raw | {"mask_token_id": MASK, "canvas_length": block, "eos_token_id": eos_id}
    return Engine.from_state(config, golden.tensors | tensors)


def params_of(run: dict) -> GenerationParams:
    """The recorded settings under the engine's names."""
    if "editing_threshold" not in run:
        return GenerationParams(
            max_new_tokens=run["gen_length"], decoder="threshold", threshold=run["threshold"], steps=run["steps"]
        )
    return GenerationParams(
        max_new_tokens=run["gen_length"],
        decoder="draft_edit",
        threshold=run["threshold"],
        edit_threshold=run["editing_threshold"],
        max_post_steps=run["max_post_steps"],
        min_transfer=run.get("num_to_transfer", 1),
    )


@pytest.mark.parametrize("name", [f"generate20/{n}" for n in RUNS_20] + [f"generate21/{n}" for n in RUNS_21])
def test_tokens_steps_and_canvases_equal_the_reference(llada2_golden, name):
    run, values = llada2_golden.meta["runs"][name], llada2_golden.values
    prompt = values[f"{name}/prompt_ids"][0]
    expected = values[f"{name}/output"][0].tolist()
    if name == "generate20/eos_early_b8":  # this one run returns its prompt as well
        expected = expected[len(prompt) :]
    if run["eos_id"] in expected:
        expected = expected[: expected.index(run["eos_id"]) + 1]
    engine = engine_of(llada2_golden, run["block_length"], run["eos_id"])
    result = engine.generate(ids=prompt.tolist(), params=params_of(run))
    assert result.token_ids == expected
    assert result.finish_reason == ("stop" if expected[-1] == run["eos_id"] else "length")

    # LLaDA2.1's generate decodes all blocks and cuts afterwards unless it is told to stop early.
    runs_on = name.startswith("generate21") and not run.get("eos_early_stop")
    engine = engine_of(llada2_golden, run["block_length"], None if runs_on else run["eos_id"])
    decoder = engine.prepare(params_of(run), ids=[1]).decoder
    (trajectory,) = engine.rollout([prompt], decoder, max_new_tokens=run["gen_length"], seeds=[0])
    assert trajectory.forwards == run["num_forwards"]
    canvases = torch.cat([block.canvas for block in trajectory.blocks])
    assert torch.equal(canvases, values[f"{name}/fwd_block_before"])
    top_prob = torch.cat([block.top_prob for block in trajectory.blocks])
    torch.testing.assert_close(top_prob, values[f"{name}/fwd_x0_p"], atol=5e-4, rtol=0)
    first_blocks = [block.steps for block in trajectory.blocks][: len(result.blocks)]
    assert result.blocks == first_blocks


def test_the_recorded_runs_are_all_of_them(llada2_golden):
    names = {f"generate20/{n}" for n in RUNS_20} | {f"generate21/{n}" for n in RUNS_21}
    assert names == set(llada2_golden.meta["runs"])


@torch.no_grad()
def draft_and_edit(model: LLaDA2, prompt: list[int], length: int, *, threshold: float, edit_threshold: float):
    """LLaDA2.1's rule in plain Python over full recomputation of the prefix: (answer, forwards)."""
    block = model.spec.canvas_length
    end = -(-(len(prompt) + length) // block) * block
    x = prompt + [MASK] * (end - len(prompt))
    forwards = 0
    for start in range(len(prompt) // block * block, end, block):
        post_steps = 0
        while True:
            masked = [i for i in range(start, start + block) if x[i] == MASK]
            post_steps += not masked
            if post_steps > 16:
                break
            ids, span = torch.tensor([x[: start + block]]), block_causal_span([0], start + block, block, "cpu")
            hidden = model.denoise(ids, None, None, span, model.new_cache(1, start + block))
            logits = model.logits(hidden)[0]
            logits[:, MASK] = float("-inf")
            probability, best = logits.softmax(-1).max(-1)
            forwards += 1
            sure = [i for i in masked if probability[i] > threshold]
            chosen = sure or sorted(masked, key=lambda i: -float(probability[i]))[:1]
            edits = [
                i
                for i in range(max(start, len(prompt)), start + block)
                if i not in masked and probability[i] > edit_threshold and int(best[i]) != x[i]
            ]
            for i in chosen + edits:
                x[i] = int(best[i])
            if not masked and not edits:
                break
    return x[len(prompt) : len(prompt) + length], forwards


@pytest.mark.parametrize("prompt_length", range(1, 10))
@pytest.mark.parametrize("mode", ["draft_edit_quality", "draft_edit_speed"])
def test_every_prompt_length_modulo_the_block_equals_full_recomputation(llada2_golden, prompt_length, mode):
    engine = engine_of(llada2_golden, 8)
    prompt = torch.randint(0, 300, (prompt_length,), generator=torch.Generator().manual_seed(prompt_length)).tolist()
    result = engine.generate(ids=prompt, params=GenerationParams(max_new_tokens=11, decoder=mode))
    thresholds = {"draft_edit_quality": (0.7, 0.5), "draft_edit_speed": (0.5, 0.0)}[mode]
    model = engine.model
    assert isinstance(model, LLaDA2)
    expected, forwards = draft_and_edit(model, prompt, 11, threshold=thresholds[0], edit_threshold=thresholds[1])
    assert (result.token_ids, result.forwards) == (expected, forwards)


@pytest.mark.parametrize("position", range(16))
def test_an_end_token_at_any_position_of_a_block_ends_the_answer_there(llada2_golden, position):
    prompt = llada2_golden.values["generate21/q_b8/prompt_ids"][0].tolist()
    settings = GenerationParams(max_new_tokens=16, decoder="draft_edit_quality")
    free = engine_of(llada2_golden, 8).generate(ids=prompt, params=settings).token_ids
    ended = engine_of(llada2_golden, 8, free[position]).generate(ids=prompt, params=settings)
    assert ended.token_ids == free[: free.index(free[position]) + 1]
    assert ended.finish_reason == "stop"
    assert len(ended.blocks) == (len(ended.token_ids) - 1) // 8 + 1


@pytest.mark.parametrize("decoder", ["threshold", "draft_edit", "draft_edit_speed"])
def test_a_mask_token_that_is_the_argmax_is_never_written_and_every_loop_ends(llada2_golden, decoder):
    """The reference may never end here: its loop waits for masks to go away that it writes itself."""
    head = llada2_golden.tensors["lm_head.weight"].clone()
    head[MASK] *= 400
    engine = engine_of(llada2_golden, 8, **{"lm_head.weight": head})
    ids = llada2_golden.values["forward/input_ids"]
    span = block_causal_span([0], 48, 8, "cpu")
    raw = engine.model.logits(engine.model.denoise(ids, None, None, span, engine.model.new_cache(1, 48)))
    assert (raw.argmax(-1) == MASK).float().mean() > 0.2
    settings = GenerationParams(max_new_tokens=24, decoder=decoder)
    result = engine.generate(ids=ids[0, :13].tolist(), params=settings)
    assert len(result.token_ids) == 24
    assert MASK not in result.token_ids
    assert max(result.blocks) <= engine.prepare(settings, ids=[1]).decoder.max_steps


@pytest.mark.parametrize(("name", "thresholds"), [("quality", (0.7, 0.5)), ("speed", (0.5, 0.0))])
def test_presets_are_the_published_modes_and_can_be_overridden(llada2_golden, name, thresholds):
    engine = engine_of(llada2_golden, 32)
    preset = engine.prepare(GenerationParams(decoder=f"draft_edit_{name}"), ids=[1]).decoder
    assert isinstance(preset, DraftEdit)
    assert (preset.threshold, preset.edit_threshold, preset.max_post_steps) == (*thresholds, 16)
    changed = engine.prepare(GenerationParams(decoder=f"draft_edit_{name}", edit_threshold=0.8), ids=[1]).decoder
    assert isinstance(changed, DraftEdit)
    assert (changed.threshold, changed.edit_threshold) == (thresholds[0], 0.8)


def test_batched_rows_decode_as_they_do_alone(llada2_golden):
    engine = engine_of(llada2_golden, 8)
    decoder = engine.prepare(GenerationParams(decoder="draft_edit_quality"), ids=[1]).decoder
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 300, (length,), generator=generator) for length in (3, 8, 17)]
    together = engine.rollout(prompts, decoder, max_new_tokens=10, seeds=[0, 0, 0])
    for prompt, row in zip(prompts, together, strict=True):
        (alone,) = engine.rollout([prompt], decoder, max_new_tokens=10, seeds=[0])
        assert torch.equal(row.response_ids, alone.response_ids)
        assert [block.steps for block in row.blocks] == [block.steps for block in alone.blocks]

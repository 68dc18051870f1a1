"""DiffusionGemma decoding through the engine, fed with the random draws of transformers' `generate`."""

import json
from dataclasses import dataclass

import pytest
import torch

from dlmrt.checkpoint.folder import parse_settings
from dlmrt.decoding import build_decoder
from dlmrt.engine import Engine
from dlmrt.errors import ModelConfigError
from dlmrt.params import GenerationParams
from dlmrt.vocab import VocabularyPass, VocabularyStats
from orl_core.decoders import EntropyBound
from orl_core.entropy import TokenStats
from orl_core.rng import Stream

RUNS = [
    ("generate_a", 0),
    ("generate_a2", 0),
    ("generate_a3", 0),
    ("generate_b", 0),
    ("generate_c", 0),
    ("generate_c", 1),
]
PAD = 0


@dataclass
class RecordedDraws:
    """Stands for the loop's DrawSource. init [canvases, C]; renoise and candidates [steps of all canvases, C]; first:
    index of each canvas' first step."""

    init: torch.Tensor
    renoise: torch.Tensor
    candidates: torch.Tensor
    first: list[int]

    def begin(self, seed_B, block_B):
        pass

    def tokens(self, stream, block_B, step_B, length, vocab_size):
        if stream is Stream.CANVAS:
            return self.init[block_B]
        return self.at(self.renoise, block_B, step_B)

    def at(self, drawn, block_B, step_B):
        # A block's last step may draw for a step that the reference no longer took.
        return drawn[(torch.tensor(self.first)[block_B] + step_B).clamp(max=len(drawn) - 1)]


@pytest.fixture
def feed(monkeypatch):
    """Makes the denoising loop take its numbers from RecordedDraws."""

    def use(draws: RecordedDraws):
        class RecordedVocabulary(VocabularyPass):
            def __call__(self, hidden_BCd, temperature_B, draw, **options):
                seen = super().__call__(hidden_BCd, temperature_B, None, **options)
                assert draw is not None
                tokens, candidate = seen.tokens, draws.at(draws.candidates, draw.block, draw.step)
                stats = TokenStats(tokens.argmax, candidate, tokens.top_prob, tokens.top_prob, tokens.entropy)
                return VocabularyStats(stats, seen.z, seen.missed)

        monkeypatch.setattr("dlmrt.loop.step.BlockDraws", lambda *_: draws)
        monkeypatch.setattr("dlmrt.loop.step.VocabularyPass", RecordedVocabulary)

    return use


def generation_of(golden, run: dict) -> dict:
    """generation_config.json with the settings of a recorded run."""
    generation = json.loads((golden.folder / "generation_config.json").read_text())
    settings = dict(run["generation_config"])
    generation["sampler_config"]["entropy_bound"] = settings.pop("entropy_bound")
    return generation | settings


@pytest.mark.parametrize(("name", "row"), RUNS)
def test_canvases_tokens_and_tpf_equal_the_recorded_runs(diffusion_gemma_golden, feed, name, row):
    run = diffusion_gemma_golden.meta["runs"][name]
    recorded = diffusion_gemma_golden.values
    values = {key.removeprefix(f"{name}/"): recorded[key] for key in recorded if key.startswith(f"{name}/")}
    canvas_of_step = values["step_canvas_index"].tolist()
    first = [canvas_of_step.index(c) for c in range(run["canvases"])]
    draws = (values[f"draw_{kind}"][:, row] for kind in ("init_canvas", "renoise", "multinomial"))
    feed(RecordedDraws(*draws, first))
    raw, tensors = diffusion_gemma_golden.raw, diffusion_gemma_golden.tensors
    engine = Engine.from_state(raw, tensors, generation=generation_of(diffusion_gemma_golden, run))
    prompt = values["prompt_ids"][row]
    if "attention_mask" in values:
        prompt = prompt[values["attention_mask"][row].bool()]
    result = engine.generate(ids=prompt.tolist())
    answer = values["sequences"][row, values["prompt_ids"].shape[1] :].tolist()
    assert result.token_ids == answer[: len(result.token_ids)]
    assert set(answer[len(result.token_ids) :]) <= {PAD}
    counted = sum(token != PAD for token in result.token_ids)
    assert counted / result.forwards == pytest.approx(values["tokens_per_forward"][row].item())

    decoder, limit = engine.prepare(ids=[1]).decoder, run["generation_config"]["max_new_tokens"]
    (trajectory,) = engine.rollout([prompt], decoder, max_new_tokens=limit, seeds=[0])
    assert [block.steps for block in trajectory.blocks] == result.blocks
    for block, begin in zip(trajectory.blocks, first, strict=False):
        steps = slice(begin, begin + block.steps)
        assert torch.equal(block.canvas, values["step_input_canvas"][steps, row])
        torch.testing.assert_close(block.entropy, values["step_processed_entropy"][steps, row], atol=5e-4, rtol=0)
        accepted = values["step_accept_mask"][steps, row]
        assert torch.equal(block.unresolved[1:], ~accepted[:-1])
        assert torch.equal(block.tokens, values["step_argmax_canvas"][begin + block.steps - 1, row])


def test_the_recorded_runs_are_all_of_them(diffusion_gemma_golden):
    assert {name for name, _ in RUNS} == set(diffusion_gemma_golden.meta["runs"])


@pytest.fixture(scope="module")
def reference(diffusion_gemma_golden):
    from transformers import DiffusionGemmaForBlockDiffusion  # seconds of imports, which collection need not pay

    folder = diffusion_gemma_golden.folder
    return DiffusionGemmaForBlockDiffusion.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize(("prompt_length", "bound", "seed"), [(1, 0.1, 3), (11, 0.5, 4), (29, 0.25, 5)])
def test_tokens_and_tpf_equal_transformers_run_beside_it(
    diffusion_gemma_golden, reference, feed, monkeypatch, prompt_length, bound, seed
):
    """Prompts below and above the sliding window; every draw of the reference is taken down as it is made."""
    # It marks steps for CUDA graphs, for which it would first import a compiler.
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    drawn = {"randint": [], "multinomial": []}
    for kind in drawn:
        original = getattr(torch, kind)

        def recorded(*args, original=original, kind=kind, **kwargs):
            drawn[kind].append(original(*args, **kwargs))
            return drawn[kind][-1]

        monkeypatch.setattr(torch, kind, recorded)
    starts = []
    encode = reference.model.encoder.forward

    def noting_the_canvas(*args, **kwargs):
        starts.append(len(drawn["multinomial"]))
        return encode(*args, **kwargs)

    monkeypatch.setattr(reference.model.encoder, "forward", noting_the_canvas)
    prompt = torch.arange(3, 3 + 7 * prompt_length, 7)[None] % 250
    settings = {"max_denoising_steps": 10, "t_min": 0.4, "t_max": 0.8, "confidence_threshold": 0.05}
    torch.manual_seed(seed)
    bounded = {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": bound}
    reference.generation_config.sampler_config = type(reference.generation_config.sampler_config)(entropy_bound=bound)
    expected = reference.generate(prompt, max_new_tokens=32, **settings)
    monkeypatch.undo()
    assert expected.sequences.shape[1] > prompt_length

    first_randint = [start + canvas for canvas, start in enumerate(starts)]
    init = torch.cat([drawn["randint"][i] for i in first_randint])
    renoise = torch.cat([draw for i, draw in enumerate(drawn["randint"]) if i not in first_randint])
    candidates = torch.cat([draw.view(1, -1) for draw in drawn["multinomial"]])
    feed(RecordedDraws(init, renoise, candidates, starts))
    raw, tensors = diffusion_gemma_golden.raw, diffusion_gemma_golden.tensors
    generation = {"sampler_config": bounded, "eos_token_id": 1, "max_new_tokens": 32, **settings}
    result = Engine.from_state(raw, tensors, generation=generation).generate(ids=prompt[0].tolist())
    answer = expected.sequences[0, prompt_length:].tolist()
    assert result.token_ids == answer[: len(result.token_ids)]
    assert set(answer[len(result.token_ids) :]) <= {PAD}
    counted = sum(token != PAD for token in result.token_ids)
    assert counted / result.forwards == pytest.approx(expected.tokens_per_forward.item())


def decoder_of(golden, generation, **params) -> EntropyBound:
    settings = parse_settings(golden.raw, generation)
    decoder = build_decoder(settings.config.spec, settings.defaults.decoder, GenerationParams(**params))
    assert isinstance(decoder, EntropyBound)
    return decoder


def test_decoder_settings_are_read_from_transformers_layout_and_can_be_overridden(diffusion_gemma_golden):
    generation = json.loads((diffusion_gemma_golden.folder / "generation_config.json").read_text())
    read = decoder_of(diffusion_gemma_golden, generation)
    assert (read.max_steps, read.entropy_bound, read.t_min, read.t_max) == (12, 0.1, 0.4, 0.8)
    assert (read.stability_threshold, read.confidence_threshold, read.greedy) == (1, 0.005, False)
    changed = decoder_of(diffusion_gemma_golden, generation, entropy_bound=0.3, max_steps=5, t_max=0.9)
    assert (changed.max_steps, changed.entropy_bound, changed.t_min, changed.t_max) == (5, 0.3, 0.4, 0.9)
    assert decoder_of(diffusion_gemma_golden, generation, temperature=0).greedy


def test_unset_settings_are_those_of_transformers(diffusion_gemma_golden):
    default = decoder_of(diffusion_gemma_golden, {})
    documented = diffusion_gemma_golden.meta["defaults_when_unset"]
    assert documented["sampler_config"] == f"EntropyBound({default.entropy_bound})"
    assert documented["max_denoising_steps"] == default.max_steps
    for key in ("t_min", "t_max", "stability_threshold", "confidence_threshold"):
        assert documented[key] == getattr(default, key), key


def test_an_own_decoder_object_takes_precedence_and_a_foreign_sampler_is_refused(diffusion_gemma_golden):
    own = {"decoder": {"name": "entropy_bound", "max_steps": 7}, "max_denoising_steps": 12}
    assert decoder_of(diffusion_gemma_golden, own).max_steps == 7
    with pytest.raises(ModelConfigError, match="_cls_name"):
        decoder_of(diffusion_gemma_golden, {"sampler_config": {"_cls_name": "OtherSamplerConfig"}})


def test_self_conditioning_can_be_withheld(diffusion_gemma_golden):
    engine = Engine.from_state(diffusion_gemma_golden.raw, diffusion_gemma_golden.tensors)
    ids = diffusion_gemma_golden.values["prompt_ids"][0].tolist()
    answers = [
        engine.generate(ids=ids, params=GenerationParams(max_new_tokens=16, max_steps=6, residual=residual)).token_ids
        for residual in (True, False, True)
    ]
    assert answers[0] == answers[2]
    assert answers[0] != answers[1]


@pytest.mark.parametrize("position", [0, 1, 7, 14, 15])
def test_an_end_token_at_any_position_of_a_canvas_ends_the_answer_there(diffusion_gemma_golden, position):
    ids = diffusion_gemma_golden.values["prompt_ids"][0].tolist()

    def answer(eos):
        engine = Engine.from_state(
            diffusion_gemma_golden.raw, diffusion_gemma_golden.tensors, generation={"eos_token_id": eos}
        )
        return engine.generate(ids=ids, params=GenerationParams(max_new_tokens=32, max_steps=4))

    free = answer([]).token_ids
    token = free[position]
    ended = answer([token])
    assert ended.token_ids == free[: free.index(token) + 1]
    assert (ended.finish_reason, len(ended.blocks)) == ("stop", 1)

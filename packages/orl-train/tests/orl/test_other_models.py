"""LLaDA2 and DiffusionGemma in the on-policy loop: tiny random models, both rollout engines."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from orl_core.errors import ConfigError
from orl_train.attention import attention_plan
from orl_train.models import TRAINABLE
from orl_train.models.diffusion_gemma import DiffusionGemmaConfig
from orl_train.models.llada2_config import LLaDA2MoeConfig
from orl_train.orl import OrlRun
from orl_train.orl.answers import collect_answers
from orl_train.orl.start import load_model
from orl_train.replay import make_packs, replay_logits, select_units

KINDS = ["llada2_moe", "diffusion_gemma"]
CANVAS, WINDOW = 8, 12  # prompts are longer than the sliding window


def accept(prompt: str, response: str, reference: object) -> bool:
    return True


def llada2(vocab_size: int) -> LLaDA2MoeConfig:
    return LLaDA2MoeConfig(
        vocab_size=vocab_size,
        hidden_size=24,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=12,
        num_experts=8,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=2,
        max_position_embeddings=160,
        canvas_length=CANVAS,
        mask_token_id=2,
        residual_intermediate_size=16,
        pad_token_id=0,
        eos_token_id=1,
    )


def diffusion_gemma(vocab_size: int) -> DiffusionGemmaConfig:
    golden = Path(__file__).parents[3] / "dlmrt" / "tests" / "golden" / "diffusion_gemma_tiny" / "config.json"
    raw = json.loads(golden.read_text())
    raw["canvas_length"] = CANVAS
    raw["text_config"] |= {"vocab_size": vocab_size, "sliding_window": WINDOW}
    raw |= {
        name: vocab_size - index for index, name in enumerate(("image_token_id", "boi_token_id", "eoi_token_id"), 1)
    }
    return DiffusionGemmaConfig.from_dict(raw)


@pytest.fixture
def folder(request, tmp_path, tokenizer) -> Path:
    """A start model of the requested kind, whose answers end now and then."""
    torch.manual_seed(0)
    gemma = request.param == "diffusion_gemma"
    config = {"llada2_moe": llada2, "diffusion_gemma": diffusion_gemma}[request.param](tokenizer.get_vocab_size())
    model = TRAINABLE[request.param](config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1 if gemma else 0.15)
        for name, parameter in model.named_parameters():
            if gemma and ("post_attention" in name or name.endswith("post_feedforward_layernorm.weight")):
                parameter.fill_(0.3)  # a step then depends little on rounding in the one before it
        model.lm_head.weight[1] *= 3 if gemma else 8  # the end token is likely
    target = tmp_path / "start"
    model.save_pretrained(target)
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0}))
    return target


def settings_of(settings, folder, engine, **overrides):
    uniform = "gemma" in (folder / "config.json").read_text()
    bounds = {"rollout__low": 3.0, "rollout__high": 9.0} if uniform else {}
    return settings(folder, rollout__engine=engine, rollout__max_new_tokens=40, **bounds, **overrides)


def answers_of(run: OrlRun):
    return collect_answers(run.behaviour, run.tokenizer, run.verifier, run.config, run.plain.config, update=0)


def both(kinds=KINDS):
    return pytest.mark.parametrize("folder", kinds, indirect=True)


@pytest.mark.parametrize("engine", ["reference", "dlmrt"])
@both()
def test_replay_reproduces_the_rollout(folder, settings, tmp_path, engine):
    """The probability ratio of trainer and rollout is 1 before the first step: same canvas, same z, same numerics."""
    config = settings_of(settings, folder, engine, replay__states_per_response=50)
    run = OrlRun(config, tmp_path / "run", accept)
    kept = answers_of(run).kept
    assert kept
    units = select_units([t for t, _ in kept], [s for _, s in kept], config.replay, 0)
    states = 0
    for packed in make_packs(units, run.plain.family, 600, run.plain.context_blocks):
        plan = attention_plan(packed.visibility, batch=1, device=torch.device("cpu"))
        with torch.no_grad():
            logits = replay_logits(run.plain, packed, plan, residual=True)
        if run.plain.family == "masked":
            logits[:, 2] = -torch.inf
            logits = logits / config.rollout.temperature
        log_p = torch.log_softmax(logits, -1)
        entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
        torch.testing.assert_close(entropy, packed.targets.rollout_entropy, atol=5e-4, rtol=5e-4)
        states += len(packed.targets.state_weight)
    assert states >= 3
    assert any(block.steps > 1 for t, _ in kept for block in t.blocks)  # some state has a residual context


@both()
def test_both_engines_give_the_same_answers(folder, settings, tmp_path):
    pytest.importorskip("dlmrt")
    found = []
    for engine in ("reference", "dlmrt"):
        run = OrlRun(settings_of(settings, folder, engine), tmp_path / engine, accept)
        found.append(answers_of(run).trajectories)
    for ours, theirs in zip(*found, strict=True):
        assert ours.response_ids.tolist() == theirs.response_ids.tolist()
        for a, b in zip(ours.blocks, theirs.blocks, strict=True):
            assert (a.start, a.steps) == (b.start, b.steps)
            assert torch.equal(a.unresolved, b.unresolved)
            torch.testing.assert_close(a.z[:2], b.z[:2], atol=1e-4, rtol=1e-3)  # each step amplifies rounding


@pytest.mark.parametrize("engine", ["reference", "dlmrt"])
@both()
def test_a_run_trains_and_its_model_loads(folder, settings, tmp_path, engine):
    if engine == "dlmrt":
        pytest.importorskip("dlmrt")
    run = OrlRun(settings_of(settings, folder, engine, loss__reference_gate=1.0), tmp_path / "run", accept)
    before = {name: p.detach().clone() for name, p in run.plain.named_parameters()}
    reports = []
    final = run.run(report=reports.append)
    assert [row["step"] for row in reports] == [1, 2, 3]
    assert all(math.isfinite(row["loss"]) for row in reports)
    assert reports[0]["retained"] > 0
    assert reports[0]["loss_kl"] == pytest.approx(0, abs=1e-6)
    assert reports[-1]["residual_ratio"] > 0
    changed = {name for name, p in run.plain.named_parameters() if not torch.equal(p, before[name])}
    for part in ("layers.0", "layers.1", "experts", "residual_adapter" if "adapter" in str(before) else "conditioning"):
        assert any(part in name for name in changed), part
    assert not any("vision" in name for name in changed)
    saved = load_file(final / "model.safetensors").keys()
    assert saved == load_file(folder / "model.safetensors").keys()
    again = load_model(final).state_dict()
    for name, tensor in run.plain.state_dict().items():
        torch.testing.assert_close(again[name], tensor, atol=1e-2, rtol=1e-2)  # written in bfloat16
    if engine == "dlmrt":
        from dlmrt.engine import Engine
        from dlmrt.params import GenerationParams

        answer = Engine.from_pretrained(final).generate(ids=[5, 6, 7], params=GenerationParams(max_new_tokens=8))
        assert len(answer.token_ids) > 0


@both()
def test_lora_updates_both_passes_and_ends_in_an_ordinary_folder(folder, settings, tmp_path):
    pytest.importorskip("peft")
    lora = {"lora": {"rank": 2}, "optimizer__adam_lr": 0.02}
    run = OrlRun(settings_of(settings, folder, "auto", loss__reference_gate=1.0, **lora), tmp_path / "run", accept)
    before = {name: p.detach().clone() for name, p in run.plain.named_parameters()}
    reports = []
    final = run.run(report=reports.append)
    assert load_file(final / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    assert reports[0]["loss_kl"] == pytest.approx(0, abs=1e-6)
    assert reports[-1]["loss_kl"] > 0
    changed = {name for name, p in run.plain.named_parameters() if not torch.equal(p, before[name])}
    assert all("lora_" in n or "residual_adapter" in n or "self_conditioning" in n for n in changed)
    run._model_writer(torch.float32)(tmp_path / "whole")
    merged = load_model(tmp_path / "whole")
    trajectory = run.rollout.rollout([torch.arange(5, 30)], run.config.rollout.decoder(run.plain.config, 0.5),
        max_new_tokens=8, seeds=[0])[0]  # fmt: skip
    (unit,) = select_units([trajectory], [0], run.config.replay, 0)
    (packed,) = make_packs([unit], run.plain.family, 600, run.plain.context_blocks)
    plan = attention_plan(packed.visibility, batch=1, device=torch.device("cpu"))
    with torch.no_grad():
        ours, theirs = (replay_logits(model, packed, plan, residual=True) for model in (run.plain, merged))
    torch.testing.assert_close(theirs, ours, atol=1e-3, rtol=0)


@both(["llada2_moe"])
def test_controls_and_untrainable_types_are_refused_before_work(folder, settings, tmp_path):
    with pytest.raises(ConfigError, match="trains qwen_dlm models only"):
        OrlRun(settings_of(settings, folder, "auto", method="rsft"), tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    with pytest.raises(ConfigError, match=r"trainable are qwen_dlm, llada2_moe, diffusion_gemma; `orl-train convert`"):
        OrlRun(settings(folder), tmp_path / "run")

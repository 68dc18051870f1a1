"""The on-policy loop: what is learned from, that a run resumes bit for bit, and how it ends when it cannot go on."""

import shutil

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file

from orl_core.errors import ConfigError, OrlError
from orl_train.attention import attention_plan
from orl_train.errors import NonFiniteLossError
from orl_train.orl import OrlRun
from orl_train.orl.answers import collect_answers
from orl_train.orl.run import NoVerifiedAnswersError, VerifierError
from orl_train.replay import ReplaySums, make_packs, replay_logits, select_units

FAMILIES = ["uniform", "masked"]


def accept(prompt: str, response: str, reference: object) -> bool:
    return True


def reject(prompt: str, response: str, reference: object) -> bool:
    return False


def answered(run: OrlRun, update: int = 0, **parts):
    return collect_answers(
        run.behaviour, run.tokenizer, run.verifier, run.config, run.plain.config, update=update, **parts
    )


@pytest.mark.parametrize("engine", ["reference", "dlmrt"])
@pytest.mark.parametrize("family", FAMILIES)
def test_replay_reproduces_the_rollout(start, settings, tmp_path, family, engine):
    """The probability ratio of trainer and rollout is 1 before the first step: same canvas, same z, same numerics."""
    config = settings(start(family), rollout__engine=engine, replay__states_per_response=50)
    run = OrlRun(config, tmp_path / "run", accept)
    kept = answered(run).kept
    assert kept
    units = select_units([t for t, _ in kept], [s for _, s in kept], config.replay, 0)
    seen = 0
    for packed in make_packs(units, run.plain.family, 600):
        plan = attention_plan(packed.visibility, batch=1, device=torch.device("cpu"))
        with torch.no_grad():
            logits = replay_logits(run.plain, packed, plan, residual=True)
        if family == "masked":
            logits[:, 2] = -torch.inf
            logits = logits / config.rollout.temperature
        log_p = torch.log_softmax(logits, -1)
        entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
        torch.testing.assert_close(entropy, packed.targets.rollout_entropy, atol=2e-4, rtol=2e-4)
        seen += len(entropy)
    assert seen >= 3 * 8


def test_only_verified_answers_are_learned_from(start, settings, tmp_path):
    run = OrlRun(settings(start("masked"), updates=1), tmp_path / "run", lambda p, r, f: "2" in p)
    before = {n: p.clone() for n, p in run.plain.named_parameters()}
    answers = answered(run)
    metrics = run.update(0)
    assert metrics["retained"] == sum(answers.verified)
    assert 0 < metrics["retained"] < len(answers.verified)
    assert metrics["reward"] == pytest.approx(metrics["retained"] / len(answers.verified))
    assert any(not torch.equal(before[n], p) for n, p in run.plain.named_parameters())


def test_nothing_is_learned_without_a_verified_answer_and_the_run_stops_with_advice(start, settings, tmp_path):
    run = OrlRun(settings(start("masked"), max_barren=2, updates=9), tmp_path / "run", reject)
    before = {n: p.clone() for n, p in run.plain.named_parameters()}
    reports = []
    with pytest.raises(NoVerifiedAnswersError, match="2 updates in a row"):
        run.run(report=reports.append)
    assert len(reports) == 1
    assert reports[0]["loss"] == 0
    assert all(torch.equal(before[n], p) for n, p in run.plain.named_parameters())


def test_a_verifier_that_raises_rejects_and_is_counted(start, settings, tmp_path):
    calls = []

    def flaky(prompt: str, response: str, reference: object) -> bool:
        calls.append(prompt)
        if len(calls) == 1:
            raise ValueError("cannot read this")
        return True

    run = OrlRun(settings(start("masked")), tmp_path / "run", flaky)
    answers = answered(run)
    assert answers.failures == 1
    assert answers.kept

    def broken(prompt: str, response: str, reference: object) -> bool:
        raise ValueError("cannot read anything")

    run.verifier = broken
    with pytest.raises(VerifierError, match="all 4 answers"):
        run.update(0)


def test_answers_do_not_depend_on_ranks(start, settings, tmp_path):
    run = OrlRun(settings(start("uniform"), rollout__rollouts=2), tmp_path / "run", accept)
    whole = answered(run)
    parts = [answered(run, rank=rank, world=3) for rank in range(3)]
    together = {s: t.response_ids.tolist() for p in parts for s, t in zip(p.samples, p.trajectories, strict=True)}
    assert together == {s: t.response_ids.tolist() for s, t in zip(whole.samples, whole.trajectories, strict=True)}


@pytest.mark.parametrize("family", FAMILIES)
def test_resumed_run_equals_the_uninterrupted_one(start, settings, tmp_path, family):
    folder = start(family)
    config = settings(folder, updates=4)
    whole = OrlRun(config, tmp_path / "whole", accept).run()
    shutil.copytree(tmp_path / "whole" / "checkpoints", tmp_path / "again" / "checkpoints")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-00000003")
    again = OrlRun(config, tmp_path / "again", accept).run()
    ours, theirs = load_file(whole / "model.safetensors"), load_file(again / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_resumes_from_a_start_model_that_was_moved_but_not_from_another_one(start, settings, tmp_path):
    folder = start("uniform")
    OrlRun(settings(folder, updates=2), tmp_path / "run", accept).run()
    shutil.copytree(folder, tmp_path / "moved")
    run = OrlRun(settings(tmp_path / "moved", updates=2), tmp_path / "run", accept)
    assert run._resume() == 1
    weights = load_file(tmp_path / "moved" / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, tmp_path / "moved" / "model.safetensors")
    with pytest.raises(ConfigError, match="made with other settings"):
        OrlRun(settings(tmp_path / "moved", updates=2), tmp_path / "run", accept).run()


@pytest.mark.parametrize(
    "overrides",
    [
        {"method": "rsft"},
        {"method": "pretrain"},
        {"off_policy": True},
        {"residual": False},
        {"loss__aec_weight": 0.0},
        {"loss__kl_weight": 0.0},
        {"loss__gate_entropy": 0.0},
    ],
    ids=str,
)
def test_ablations_and_controls_train(start, settings, tmp_path, overrides):
    run = OrlRun(settings(start("uniform"), updates=1, **overrides), tmp_path / "run", accept)
    before = {n: p.clone() for n, p in run.plain.named_parameters()}
    metrics = run.update(0)
    changed = {n for n, p in run.plain.named_parameters() if not torch.equal(before[n], p)}
    assert "model.layers.0.mlp.up_proj.weight" in changed
    assert metrics["loss"] > 0
    if overrides == {"residual": False}:
        assert not any(n.startswith("residual_adapter") for n in changed)
        assert metrics["residual_ratio"] == 0
    if overrides == {"off_policy": True}:
        assert run.behaviour is not run.rollout


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_replay_has_the_gradient_of_the_float32_one(start, settings, tmp_path, family):
    folder, gradients, losses = start(family), {}, {}
    for precision in ("no", "bf16"):
        AcceleratorState._reset_state(reset_partial_state=True)
        run = OrlRun(settings(folder, precision=precision, replay__states_per_response=50), tmp_path / "run", accept)
        run._step = lambda sums, update: None
        losses[precision] = run.update(0)["loss"]
        assert all(p.dtype == torch.float32 for p in run.plain.parameters())
        gradients[precision] = torch.cat([p.grad.flatten() for p in run.plain.parameters() if p.grad is not None])
    assert losses["bf16"] != losses["no"]
    assert losses["bf16"] == pytest.approx(losses["no"], rel=0.02)
    assert torch.nn.functional.cosine_similarity(gradients["bf16"], gradients["no"], dim=0) > 0.99


def test_non_finite_loss_stops_and_keeps_the_checkpoint(start, settings, tmp_path):
    run = OrlRun(settings(start("masked"), updates=5), tmp_path / "run", accept)

    def poison(metrics: dict[str, float]) -> None:
        if metrics["step"] == 2:
            with torch.no_grad():
                run.plain.lm_head.weight[5] = torch.inf

    with pytest.raises(OrlError, match=r"NaN|infinite"):
        run.run(report=poison)
    assert (tmp_path / "run" / "checkpoints" / "step-00000001" / "run.json").is_file()


def test_wrong_models_are_refused_before_work(start, settings, tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        OrlRun(settings(tmp_path / "nothing"), tmp_path / "run")
    folder = start("masked")
    with pytest.raises(ConfigError, match="state_family"):
        OrlRun(settings(folder, reference=str(start("uniform"))), tmp_path / "run")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        OrlRun(settings(folder), tmp_path / "run")


def test_prompts_beyond_the_context_are_refused(start, settings, tmp_path):
    run = OrlRun(settings(start("masked"), rollout__max_new_tokens=150), tmp_path / "run", accept)
    with pytest.raises(OrlError, match="context of 160"):
        run.update(0)


def test_non_finite_total_is_a_typed_error(start, settings, tmp_path, monkeypatch):
    run = OrlRun(settings(start("masked"), updates=1), tmp_path / "run", accept)
    monkeypatch.setattr("orl_train.orl.run.replay_backward", lambda *args, **options: ReplaySums(total=float("nan")))
    with pytest.raises(NonFiniteLossError, match="lower learning rate"):
        run.update(0)

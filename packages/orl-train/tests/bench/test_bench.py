"""The arms of the bench compute the same loss and gradients, and a difference is noticed."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from orl_core.errors import ConfigError
from orl_core.losses import OrlLossConfig
from orl_train.bench import measure
from orl_train.bench.measure import ARMS, Bench, BenchError, compare
from orl_train.bench.padded import padded_backward, state_length
from orl_train.cli import app
from orl_train.replay import ReplaySettings, make_packs, replay_backward, select_units
from orl_train.rollout import ReferenceRollout


@pytest.fixture
def workload(small_workload):
    return small_workload(2)


def test_padded_replay_has_the_losses_and_gradients_of_the_packed_one(workload, small_workload):
    model = workload.model
    reference = small_workload(2, seed=1).model
    rollout = ReferenceRollout(model, workload.stop_ids)
    answers = rollout.rollout(workload.prompts, workload.decoder, max_new_tokens=12, seeds=[1, 2])
    units = select_units(answers, [0, 1], ReplaySettings(states_per_response=99), seed=0)
    config = OrlLossConfig(reference_gate=1.0, rho=0.9)
    common = {"responses": 2, "residual": True}

    def gradients():
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return found

    packed = replay_backward(model, reference, make_packs(units, "masked", 2048), config, **common)
    expected = gradients()
    padded = padded_backward(model, reference, units, "masked", config, length=state_length(units), **common)
    for name in ("total", "prediction", "kl", "aec"):
        assert getattr(packed, name) > 0
        assert getattr(padded, name) == pytest.approx(getattr(packed, name), rel=1e-5)
    for name, gradient in gradients().items():
        assert expected[name].abs().max() > 0
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_every_arm_replays_every_state_and_the_weights_are_restored(workload):
    bench = Bench(workload, engine="reference")
    steps = {arm.name: bench.step(arm, 3) for arm in ARMS}
    losses = [sums.total for _, sums, _ in steps.values()]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    assert len({sizes["states"] for _, _, sizes in steps.values()}) == 1
    sizes = {name: size for name, (_, _, size) in steps.items()}
    assert sizes["off"]["replayed_tokens"] > 3 * sizes["all"]["replayed_tokens"]
    assert sizes["all"]["responses"] == 6
    changed = [not torch.equal(p, bench._start[name]) for name, p in bench.model.named_parameters()]
    assert all(changed)


def test_arms_that_differ_are_an_error(workload, monkeypatch):
    backward = measure.padded_backward

    def other(*arguments, **keywords):
        sums = backward(*arguments, **keywords)
        sums.total *= 1 + 3e-5
        return sums

    monkeypatch.setattr(measure, "padded_backward", other)
    with pytest.raises(BenchError, match=r"arm 'packed' is .*; they must agree"):
        compare(Bench(workload, engine="reference"), 2, 1)


def test_the_command_prints_one_json_object(workload, monkeypatch):
    monkeypatch.setattr("orl_train.bench.workload.random_workload", lambda *_, **__: workload)
    result = CliRunner().invoke(app, ["bench", "--rollouts", "2", "--rollouts", "1", "--repeat", "1", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["rollouts"] == 1
    assert report["by_rollouts"].keys() == {"1", "2"}
    for found in report["by_rollouts"].values():
        for kind in ("", "cpu_"):
            assert found[f"{kind}speedup"] == pytest.approx(math.prod(found[f"{kind}parts"].values()))
        assert found["seconds"]["off"]["step"] > 0
    assert report["speedup"] == report["by_rollouts"]["1"]["speedup"]


def test_one_prompt_is_shared_by_both_ranks(small_workload):
    report = measure.bench_report(small_workload(1), [2], 1, engine="reference")
    assert report["by_rollouts"]["2"]["responses"] == 2
    with pytest.raises(ConfigError, match="leaves a rank without answers"):
        Bench(small_workload(1), engine="reference").step(ARMS[-1], 1)


def test_a_start_that_is_no_model_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["bench", "--start", str(tmp_path)])
    assert result.exit_code == 1
    assert "config.json" in result.output

"""The on-policy loop with LoRA: what it trains, that it resumes bit for bit, and the ordinary model it ends in."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from orl_core.errors import ConfigError
from orl_train.config import build_config
from orl_train.lora import StartModel, merged_state
from orl_train.orl import OrlConfig, OrlRun
from orl_train.orl.start import load_model
from orl_train.rollout import ReferenceRollout

pytest.importorskip("peft")

LORA = {"lora": {"rank": 4, "alpha": 16.0}, "optimizer__adam_lr": 0.02}


def accept(prompt: str, response: str, reference: object) -> bool:
    return True


@pytest.mark.parametrize("engine", ["reference", "dlmrt"])
def test_a_run_ends_in_an_ordinary_folder_with_the_updates_added(start, settings, tmp_path, engine):
    folder = start("masked")
    run = OrlRun(
        settings(folder, rollout__engine=engine, evaluate_every=3, loss__reference_gate=1.0, **LORA),
        tmp_path / "run",
        accept,
    )
    assert isinstance(run.reference, StartModel)
    before = {name: p.detach().clone() for name, p in run.plain.named_parameters()}
    reports = []
    final = run.run(report=reports.append)
    changed = {name for name, p in run.plain.named_parameters() if not torch.equal(p, before[name])}
    assert {name.partition(".")[0] for name in changed} == {"model", "residual_adapter"}
    assert all("lora_" in name or name.startswith("residual_adapter.") for name in changed)
    assert reports[0]["loss_kl"] == pytest.approx(0, abs=1e-6)  # the reference is the start model
    assert reports[-1]["loss_kl"] > 1e-4
    assert load_file(final / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    again = load_model(final).state_dict()
    for name, tensor in merged_state(run.plain).items():
        assert torch.equal(again[name], tensor.to(torch.bfloat16).float()), name
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (final / name).read_bytes() == (folder / name).read_bytes()


def test_the_engine_rolls_out_with_the_updates(start, settings, tmp_path):
    """dlmrt's engine, which is handed the updated weights, answers as the training model itself."""
    pytest.importorskip("dlmrt")
    run = OrlRun(settings(start("masked"), rollout__engine="dlmrt", **LORA), tmp_path / "run", accept)
    decoder, prompt = run.config.rollout.decoder(run.plain.config, 0.5), [torch.arange(5, 16)]
    own = ReferenceRollout(run.plain, frozenset([1]))

    def states(rollout):
        return rollout.rollout(prompt, decoder, max_new_tokens=16, seeds=[0])[0].blocks[0]

    at_start = states(own).entropy[0]
    for update in range(2):
        run.update(update)
    run.evaluation()
    engine, trained = states(run.rollout), states(own)
    torch.testing.assert_close(engine.entropy[0], trained.entropy[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(trained.entropy[0], at_start, atol=1e-2)


@pytest.mark.parametrize("method", ["orl", "rsft"])
def test_resumed_run_equals_the_uninterrupted_one(start, settings, tmp_path, method):
    folder = start("uniform")
    config = settings(folder, updates=4, method=method, **LORA)
    whole = OrlRun(config, tmp_path / "whole", accept)
    whole.run()
    shutil.copytree(tmp_path / "whole" / "checkpoints", tmp_path / "again" / "checkpoints")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-00000003")
    again = OrlRun(config, tmp_path / "again", accept)
    reports = []
    again.run(report=reports.append)
    assert [row["step"] for row in reports] == [3, 4]
    theirs = dict(again.plain.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in whole.plain.named_parameters())
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-00000003" / "model"
    assert load_file(checkpoint / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    assert load_model(checkpoint).config.canvas_length == 8


def test_a_model_without_adapter_trains_its_updates_alone(start, settings, tmp_path):
    folder = start("uniform")
    model = load_model(folder)
    model.config.residual_intermediate_size, model.residual_adapter = 0, None
    model.save_pretrained(folder)
    run = OrlRun(settings(folder, residual=False, **LORA), tmp_path / "run", accept)
    before = {name: p.detach().clone() for name, p in run.plain.named_parameters()}
    run.update(0)
    changed = {name for name, p in run.plain.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)


def test_the_table_is_optional_and_checked(tmp_path):
    assert build_config(OrlConfig, {"start": "x"}, "test").lora is None
    assert build_config(OrlConfig, {"start": "x", "lora": {}}, "test").lora.rank == 16
    with pytest.raises(ConfigError, match=r"\[lora\]: unknown setting 'ranks'"):
        build_config(OrlConfig, {"start": "x", "lora": {"ranks": 2}}, "test")
    with pytest.raises(ConfigError, match="lora must be a table, not 3"):
        build_config(OrlConfig, {"start": "x", "lora": 3}, "test")

"""Pretraining as a whole: what it writes, and that neither kill, nor Ctrl-C, nor a full disk, nor NaN loses a run."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from orl_core.arithmetic import draw_problem
from orl_core.errors import ConfigError
from orl_train import checkpoint, pretrain, saving
from orl_train.config import to_dict
from orl_train.errors import CheckpointError, NonFiniteLossError

CHILD = """
import json, sys
from functools import partial
from pathlib import Path
from orl_train import pretrain
from orl_train.config import build_config

pretrain.arithmetic_tokenizer = partial(pretrain.arithmetic_tokenizer, texts=300)
config = build_config(pretrain.PretrainConfig, json.loads(sys.argv[1]), "child")
pretrain.pretrain(config, Path(sys.argv[2]), report=lambda metrics: print(int(metrics["step"]), flush=True))
"""


def run(config, out, **arguments):
    """(metrics of every update, bytes of the final weights)"""
    metrics = []
    model = pretrain.pretrain(config, out, report=metrics.append, **arguments)
    return metrics, (model / "model.safetensors").read_bytes()


def without_time(metrics):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in metrics]


def test_the_loss_falls_and_the_model_is_an_ordinary_folder(quick_start, tiny_run, tmp_path, tokenizer, capsys):
    config = tiny_run(steps=30, save_every=25, optimizer={"warmup": 1, "adam_lr": 0.01})
    metrics, _ = run(config, tmp_path)
    assert [row["step"] for row in metrics] == list(range(1, 31))
    assert sum(row["loss"] for row in metrics[-5:]) < 0.95 * sum(row["loss"] for row in metrics[:5])
    assert {row["residual"] for row in metrics} == {0.0, 1.0}
    folder = tmp_path / "model"
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["decoder"] == {"name": "entropy_bound", "entropy_bound": 0.1}
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (1, 0)
    raw = json.loads((folder / "config.json").read_text())
    assert (raw["model_type"], raw["canvas_length"], raw["dtype"]) == ("qwen_dlm", 16, "bfloat16")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_a_checkpoint_holds_the_weights_once(quick_start, tiny_run, tmp_path):
    run(tiny_run(steps=3, save_every=2), tmp_path)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["model", "run.json", "state"]
    assert not list((folder / "state").glob("*.safetensors"))
    assert {t.dtype for t in load_file(folder / "model" / "model.safetensors").values()} == {torch.float32}


def test_dlmrt_loads_the_model(quick_start, tiny_run, tmp_path):
    engine = pytest.importorskip("dlmrt.engine").Engine
    run(tiny_run(steps=1, model_state_family="masked"), tmp_path)
    loaded = engine.from_pretrained(tmp_path / "model", device="cpu")
    assert loaded.model.spec.family == "masked"
    prompt = draw_problem("test", 0, 0).prompt
    assert loaded.codec.render([{"role": "user", "content": prompt}]) == prompt + "\n"
    assert loaded.generate(prompt).token_ids


def test_a_killed_run_continues_bit_for_bit(quick_start, tiny_run, tmp_path):
    config = tiny_run(steps=60, save_every=3, precision="bf16")
    expected, weights = run(config, tmp_path / "whole")
    moment = random.Random()  # a new moment each time; it is named if the test fails
    step, delay = moment.randrange(3, 30), moment.uniform(0, 0.2)
    command = [sys.executable, "-c", CHILD, json.dumps(to_dict(config)), str(tmp_path / "killed")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    for line in child.stdout:
        if int(line) >= step:
            break
    time.sleep(delay)
    child.kill()
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    metrics, resumed = run(config, tmp_path / "killed")
    assert metrics[0]["step"] > 1, "it began anew"
    assert without_time(metrics) == without_time(expected[-len(metrics) :]), f"killed {delay} s after update {step}"
    assert resumed == weights, f"killed {delay} s after update {step}"
    assert not list((tmp_path / "killed" / "checkpoints").glob("*.tmp"))


def test_ctrl_c_saves_after_the_update_and_the_run_continues(quick_start, tiny_run, tmp_path, capsys):
    config = tiny_run(steps=6, save_every=100)
    expected, weights = run(config, tmp_path / "whole")
    seen = []

    def interrupt(metrics):
        seen.append(metrics)
        if metrics["step"] == 4:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        pretrain.pretrain(config, tmp_path / "stopped", report=interrupt)
    assert signal.getsignal(signal.SIGINT) is handler
    assert "saving after this update" in capsys.readouterr().err
    assert checkpoint.latest(tmp_path / "stopped" / "checkpoints").name == "step-00000004"
    metrics, resumed = run(config, tmp_path / "stopped")
    assert without_time(seen + metrics) == without_time(expected)
    assert resumed == weights


def test_a_second_ctrl_c_stops_at_once(quick_start, tiny_run, tmp_path):
    def interrupt_twice(metrics):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        pretrain.pretrain(tiny_run(), tmp_path, report=interrupt_twice)
    assert checkpoint.latest(tmp_path / "checkpoints") is None


def test_a_full_disk_keeps_the_checkpoint_before(quick_start, tiny_run, tmp_path, monkeypatch):
    config = tiny_run(steps=7, save_every=2)
    expected, weights = run(config, tmp_path / "whole")
    write = checkpoint.write_json

    def full_at_4(path, value):
        if path.name == "run.json" and value["step"] == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, value)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_json", full_at_4)
        with pytest.raises(CheckpointError, match=r"step-00000004: .*No space left on device.*make room"):
            run(config, tmp_path / "full")
    assert [path.name for path in (tmp_path / "full" / "checkpoints").iterdir()] == ["step-00000002"]
    metrics, resumed = run(config, tmp_path / "full")
    assert without_time(metrics) == without_time(expected[2:])
    assert resumed == weights


@pytest.mark.parametrize("poisoned", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(
    quick_start, tiny_run, tmp_path, monkeypatch, poisoned
):
    original, calls = pretrain.batch_loss, []

    def poison(*arguments, **settings):
        loss = original(*arguments, **settings)
        calls.append(loss)
        if len(calls) <= 6:  # two micro-batches an update: the fourth update
            return loss
        return loss * float("nan") if poisoned == "loss" else loss + (1e30 * loss - (1e30 * loss).detach()) * 1e30

    monkeypatch.setattr(pretrain, "batch_loss", poison)
    metrics = []
    with pytest.raises(NonFiniteLossError, match=r"at update 4; the last good checkpoint is .*step-00000002"):
        pretrain.pretrain(tiny_run(), tmp_path, report=metrics.append)
    assert len(metrics) == 3
    saved = load_file(checkpoint.latest(tmp_path / "checkpoints") / "model" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
    assert not (tmp_path / "model").exists()


def test_other_settings_are_refused_unless_the_run_starts_anew(quick_start, tiny_run, tmp_path):
    run(tiny_run(steps=3), tmp_path)
    with pytest.raises(ConfigError, match=r"step-00000002 was made with other settings; .* or --no-resume"):
        run(tiny_run(steps=4), tmp_path)
    metrics, _ = run(tiny_run(steps=4), tmp_path, resume=False)
    assert len(metrics) == 4


@pytest.mark.parametrize("file", ["model/model.safetensors", "state/optimizer.bin", "run.json"])
def test_a_damaged_checkpoint_is_a_typed_error(quick_start, tiny_run, tmp_path, file):
    run(tiny_run(steps=3), tmp_path)
    path = checkpoint.latest(tmp_path / "checkpoints") / file
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="step-00000002"):
        run(tiny_run(steps=3), tmp_path)


def test_progress_bars_are_restored(monkeypatch):
    calls = []
    monkeypatch.setattr(saving.logging, "is_progress_bar_enabled", lambda: True)
    monkeypatch.setattr(saving.logging, "disable_progress_bar", lambda: calls.append("off"))
    monkeypatch.setattr(saving.logging, "enable_progress_bar", lambda: calls.append("on"))
    with pytest.raises(ValueError, match="inside"), saving.no_progress_bars():
        raise ValueError("inside")
    assert calls == ["off", "on"]


def test_a_run_continues_from_a_model_with_its_tokenizer(quick_start, tiny_run, tmp_path):
    run(tiny_run(steps=2), tmp_path / "first")
    start = tmp_path / "first" / "model"
    config = tiny_run(steps=2, seed=5, start=str(start))
    tokenizer, model = pretrain.start_of(config)
    assert tokenizer.get_vocab() == pretrain.start_of(tiny_run(steps=2))[0].get_vocab()
    saved = load_file(start / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor.float()) for name, tensor in saved.items())
    run(config, tmp_path / "second")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        run(tiny_run(steps=2, start=str(tmp_path)), tmp_path / "fourth")


def test_a_model_of_one_family_starts_the_other_with_an_untrained_adapter(quick_start, tiny_run, tmp_path):
    run(tiny_run(steps=3, self_conditioning=1.0, model_state_family="masked"), tmp_path / "masked")
    start = tmp_path / "masked" / "model"
    config = tiny_run(steps=2, start=str(start), fresh_adapter=True)
    tokenizer, model = pretrain.start_of(config)
    assert (model.family, model.config.mask_token_id) == ("uniform", None)
    saved = load_file(start / "model.safetensors")
    adapter = {name for name in saved if name.startswith("residual_adapter.")}
    assert adapter
    assert saved["residual_adapter.down_proj.weight"].any()
    assert not model.state_dict()["residual_adapter.down_proj.weight"].any()
    assert all(torch.equal(model.state_dict()[name], saved[name].float()) for name in saved.keys() - adapter)
    run(config, tmp_path / "uniform")
    raw = json.loads((tmp_path / "uniform" / "model" / "config.json").read_text())
    assert (raw["state_family"], raw["mask_token_id"]) == ("uniform", None)
    back = tiny_run(steps=2, start=str(tmp_path / "uniform" / "model"), model_state_family="masked")
    _, model = pretrain.start_of(back)
    assert (model.family, model.config.mask_token_id) == ("masked", tokenizer.token_to_id("<mask>"))
    other = tiny_run(steps=2, start=str(start), model_canvas_length=32)
    with pytest.raises(ConfigError, match="canvas_length"):
        run(other, tmp_path / "third")
    with pytest.raises(ConfigError, match="start is not given"):
        tiny_run(steps=2, fresh_adapter=True)

"""Two gloo ranks of the on-policy loop do what one does: whole models, in FSDP2's shards, and with LoRA."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from orl_core.errors import ConfigError
from orl_train.config import to_dict
from orl_train.orl import OrlRun
from orl_train.orl.start import check_sharded

PROGRAM = """
import json, shutil, sys
from pathlib import Path
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from orl_train.cli.training import end_ranks
from orl_train.config import build_config
from orl_train.orl import OrlConfig, OrlRun, run as loop
from orl_train.sharding import is_sharded

config = build_config(OrlConfig, json.loads(sys.argv[1]), "rank")
out, sharded = Path(sys.argv[2]), sys.argv[3] == "sharded"

def with_plugin(**options):  # accelerate itself reads the example configurations on GPUs only
    accelerator = Accelerator(**options)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        ignored_modules="residual_adapter",
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    return accelerator

if sharded:
    loop.Accelerator, loop.sharding_asked = with_plugin, lambda accelerator: True

def trained(folder):
    reports = []
    run = OrlRun(config, folder, lambda prompt, response, reference: True)
    assert is_sharded(run.plain) == sharded
    run.run(report=reports.append)
    return run, reports

run, reports = trained(out / "run")
if run.accelerator.is_main_process:
    (out / "reports.json").write_text(json.dumps(reports))
    shutil.copytree(out / "run" / "checkpoints", out / "again" / "checkpoints")
    shutil.rmtree(out / "again" / "checkpoints" / "step-00000002")
else:
    assert reports == []
run.accelerator.wait_for_everyone()
again, _ = trained(out / "again")
del run, again
end_ranks()
"""


def launch(config, out, world, kind):
    """Runs the ranks as `accelerate launch` does; returns (reports, float32 model after one update, final, resumed)."""
    out.mkdir(parents=True)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-c", PROGRAM, json.dumps(to_dict(config)), str(out), kind]
        environment = os.environ | shared | (own if world > 1 else {})
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [rank.communicate(timeout=500)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(errors)[-5000:]
    folders = ("run/checkpoints/step-00000001/model", "run/model", "again/model")
    reports = json.loads((out / "reports.json").read_text())
    return reports, *(load_file(out / folder / "model.safetensors") for folder in folders)


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["all weights", "lora"])
def test_two_ranks_train_as_one_and_resume(start, settings, tmp_path, lora):
    pytest.importorskip("dlmrt")
    folder, options = start("masked"), {}
    if lora:
        pytest.importorskip("peft")
        options = {"lora": lora}
    config = settings(folder, loss__reference_gate=1.0, rollout__engine="dlmrt", optimizer__warmup=1, **options)
    before = load_file(folder / "model.safetensors")
    alone, expected, _, _ = launch(config, tmp_path / "one", 1, "whole")
    for kind in ("sharded",) if lora else ("whole", "sharded"):
        reports, found, final, resumed = launch(config, tmp_path / kind, 2, kind)
        assert [row["step"] for row in reports] == [1, 2, 3]
        for name in ("loss", "loss_prediction", "loss_kl", "loss_aec", "reward", "tpf", "retained", "uncertain"):
            assert reports[0][name] == pytest.approx(alone[0][name], rel=1e-4, abs=1e-7), name
        assert found.keys() == expected.keys() == final.keys() == before.keys()
        moved = 0
        for name, tensor in expected.items():
            step, theirs = tensor - before[name], found[name] - before[name]
            moved += int(step.abs().max() > 0)
            # Muon works in bfloat16 and makes much of the smallest singular values
            assert (theirs - step).abs().mean() <= 0.3 * step.abs().mean() + 1e-7, name
            assert torch.equal(final[name], resumed[name]), name
        assert moved > 5


def test_what_does_not_run_in_shards_is_refused(start, settings):
    folder = start("masked")
    with pytest.raises(ConfigError, match="method is 'rsft'"):
        check_sharded(settings(folder, method="rsft"))
    with pytest.raises(ConfigError, match=r"rollout\.engine is 'reference'"):
        check_sharded(settings(folder, rollout__engine="reference"))


def test_sharding_is_asked_for_by_accelerate_alone(start, settings, tmp_path, monkeypatch):
    monkeypatch.setattr("orl_train.orl.run.sharding_asked", lambda accelerator: True)
    with pytest.raises(ConfigError, match="FSDP2"):
        OrlRun(settings(start("masked"), method="rsft"), tmp_path / "run")

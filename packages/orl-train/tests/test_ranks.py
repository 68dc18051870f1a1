"""Two gloo ranks compute what one does: loss, gradients, learning rate, and who writes."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from orl_core.errors import ConfigError
from orl_train import pretrain
from orl_train.config import to_dict

PROGRAM = """
import json, os, sys
from functools import partial
from pathlib import Path
from safetensors.torch import save_file
from orl_train import pretrain
from orl_train.config import build_config

out = Path(sys.argv[2])
pretrain.arithmetic_tokenizer = partial(pretrain.arithmetic_tokenizer, texts=300)
accumulate, losses = pretrain.accumulate, []

def recorded(accelerator, model, *arguments):
    losses.append(accumulate(accelerator, model, *arguments))
    named = accelerator.unwrap_model(model).named_parameters()
    gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
    save_file(gradients, out / f"gradients-{len(losses)}-{accelerator.process_index}.safetensors")
    return losses[-1]

pretrain.accumulate = recorded
config = build_config(pretrain.PretrainConfig, json.loads(sys.argv[1]), "rank")
metrics = []
pretrain.pretrain(config, out, report=metrics.append)
rank = os.environ.get("RANK", "0")
(out / f"rank-{rank}.json").write_text(json.dumps({"losses": losses, "metrics": metrics}))
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def launch(config, out, world):
    """Runs the ranks as `accelerate launch` does: through environment variables."""
    out.mkdir()
    shared = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    if world > 1:
        shared |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared |= {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
        command = [sys.executable, "-c", PROGRAM, json.dumps(to_dict(config)), str(out)]
        ranks.append(subprocess.Popen(command, env=os.environ | shared | own, stderr=subprocess.PIPE, text=True))
    errors = [rank.communicate(timeout=500)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(errors)
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def runs(tiny_run, tmp_path_factory):
    """Five samples an update, so that the ranks have three and two."""
    folder = tmp_path_factory.mktemp("ranks")
    config = tiny_run(steps=3, batch_size=5, micro_batch_size=2, self_conditioning=1.0, save_every=2)
    return folder, launch(config, folder / "one", 1), launch(config, folder / "two", 2)


def test_ranks_agree_with_one_another_and_with_one(runs):
    _, (one,), (first, second) = runs
    assert first["losses"] == second["losses"]
    assert first["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
    assert first["losses"] == pytest.approx(one["losses"], rel=1e-3)  # Muon works in bfloat16


def test_gradients_are_those_of_one_rank(runs):
    folder, _, _ = runs
    expected = load_file(folder / "one" / "gradients-1-0.safetensors")
    assert any(gradient.abs().max() > 1e-3 for gradient in expected.values())
    for rank in (0, 1):
        found = load_file(folder / "two" / f"gradients-1-{rank}.safetensors")
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_the_learning_rate_counts_updates_not_ranks(runs):
    _, (one,), (first, _) = runs
    assert [row["lr"] for row in first["metrics"]] == [row["lr"] for row in one["metrics"]]
    assert len({row["lr"] for row in one["metrics"]}) == 3


def test_only_the_first_rank_reports_and_writes(runs):
    folder, _, (first, second) = runs
    assert [row["step"] for row in first["metrics"]] == [1, 2, 3]
    assert second["metrics"] == []
    assert (folder / "two" / "checkpoints" / "step-00000002" / "run.json").is_file()
    assert (folder / "two" / "model" / "model.safetensors").is_file()


def test_a_batch_smaller_than_the_ranks_is_refused(quick_start, tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain.Accelerator, "num_processes", 5)
    with pytest.raises(ConfigError, match="batch_size is 4; it must be at least 5"):
        pretrain.pretrain(tiny_run(), tmp_path)

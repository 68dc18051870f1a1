"""Two gloo ranks replay balanced shares with the losses and gradients of one rank, whole or sharded by FSDP2."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from orl_core.balance import CostModel
from orl_train.sharding import clip_gradients, is_sharded, rank_packs, whole_state

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
from orl_core.losses import OrlLossConfig
from orl_train.bench.workload import random_workload
from orl_train.optim import OptimizerConfig, build_optimizers
from orl_train.replay import ReplaySettings, cost_model, replay_backward, select_units
from orl_train.rollout import ReferenceRollout
from orl_train.sharding import (add_up_gradients, clip_gradients, is_sharded, load_whole_state, rank_packs,
    sum_sharded_gradients, whole_state)
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

out, sharded, responses = sys.argv[1], sys.argv[2] == "sharded", int(sys.argv[3])
shape = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, residual_intermediate_size=16, canvas_length=4)
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
workload = random_workload(responses, context=12, steps=3, **shape)
model, reference = workload.model, random_workload(1, context=12, steps=3, seed=1, **shape).model
seeds = range(responses)
answers = ReferenceRollout(model, workload.stop_ids).rollout(workload.prompts, workload.decoder, max_new_tokens=12,
    seeds=seeds)
units = select_units(answers, seeds, ReplaySettings(states_per_response=99, token_budget=64), seed=0)
before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
if sharded:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model, ignored_params=set(model.residual_adapter.parameters()))  # as the example configurations do
    sum_sharded_gradients(model)
assert is_sharded(model) == sharded
assert all(torch.equal(tensor, before[name]) for name, tensor in whole_state(model).items())
packs = rank_packs(units, cost_model(model.config), "masked", 64, rank=rank, world=world, width=16)
config = OrlLossConfig(reference_gate=1.0, rho=0.9)
sums = replay_backward(model, reference, packs, config, responses=responses, residual=True)
if world > 1:
    add_up_gradients(model)
whole = lambda x: x.full_tensor() if isinstance(x, DTensor) else x.clone()
found = {name: whole(p.grad) for name, p in model.named_parameters()}
found["norm"] = torch.tensor(clip_gradients(model, 0.5))
for optimizer in build_optimizers(model, OptimizerConfig(muon_lr=0.1, adam_lr=0.1)):
    optimizer.step()
found |= {f"step.{name}": tensor - before[name] for name, tensor in whole_state(model).items()}
load_whole_state(model, before)
assert all(torch.equal(tensor, before[name]) for name, tensor in whole_state(model).items())
found |= {f"loss_{name}": torch.tensor(getattr(sums, name)) for name in ("total", "prediction", "kl", "aec")}
found["packs"] = torch.tensor([len(packs), sum(len(pack.rows) > 0 for pack in packs)])
save_file({name: tensor.detach().contiguous().clone() for name, tensor in found.items()}, f"{out}/{rank}.safetensors")
if dist.is_initialized():
    dist.destroy_process_group()
"""


def launch(folder, kind, world, responses):
    folder.mkdir()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    for rank in range(world):
        own = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-c", PROGRAM, str(folder), kind, str(responses)]
        environment = os.environ | shared | (own if world > 1 else {})
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [rank.communicate(timeout=500)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(errors)
    return [load_file(folder / f"{rank}.safetensors") for rank in range(world)]


@pytest.mark.parametrize("responses", [5, 1])
@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_two_ranks_have_the_losses_and_gradients_of_one(kind, responses, tmp_path):
    """One response is too few for two ranks: one of them replays padding alone in some steps."""
    (one,) = launch(tmp_path / "one", "whole", 1, responses)
    first, second = launch(tmp_path / "two", kind, 2, responses)
    assert first["packs"][0] == second["packs"][0]  # as many forwards on each rank
    for name, expected in one.items():
        if name == "packs":
            continue
        assert expected.abs().max() > 0, name
        if name.startswith("loss_"):
            torch.testing.assert_close(first[name] + second[name], expected, rtol=1e-5, atol=0, msg=name)
            continue
        for rank in (first, second):
            if name.startswith("step."):  # Muon works in bfloat16 and makes much of the smallest singular values
                assert (rank[name] - expected).abs().mean() < 0.3 * expected.abs().mean(), name
                continue
            torch.testing.assert_close(rank[name], expected, rtol=1e-4, atol=1e-6, msg=name)


def test_a_rank_without_work_gets_padding():
    costs = CostModel.of_transformer(layers=1, hidden=2, heads=1, kv_heads=1, head_dim=2, intermediate=2, vocab_size=4)
    shares = [rank_packs([], costs, "masked", 64, rank=rank, world=2, width=3) for rank in (0, 1)]
    assert len(shares[0]) == len(shares[1]) == 1
    assert len(shares[0][0].rows) == 0


def test_the_state_of_an_ordinary_model_is_its_own():
    model = torch.nn.Linear(2, 3)
    assert not is_sharded(model)
    assert whole_state(model)["weight"].data_ptr() == model.weight.data_ptr()


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_is_that_of_torch(limit):
    models = [torch.nn.Linear(2, 3) for _ in range(2)]
    for model in models:
        for parameter in model.parameters():
            parameter.grad = torch.arange(1.0, parameter.numel() + 1).view_as(parameter)
    expected = torch.nn.utils.clip_grad_norm_(models[0].parameters(), limit)
    assert clip_gradients(models[1], limit) == pytest.approx(expected.item())
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)

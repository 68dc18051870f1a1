"""Routed experts against a loop over tokens, and their independence of data-dependent shapes."""

import pytest
import torch
from torch.nn import functional as F

from dlmrt.models.experts import Experts, expert_shapes

E, N, K, D, M = 6, 11, 2, 16, 8


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = expert_shapes("e.", E, D, M)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def routed(seed=1, experts=E):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=generator)
    index = torch.rand(N, experts, generator=generator).topk(K).indices
    return x, index, torch.rand(N, K, generator=generator)


def loop(tensors, x, index, weight):
    rows = []
    for token in range(len(x)):
        row = torch.zeros(D)
        for expert, w in zip(index[token].tolist(), weight[token], strict=True):
            gate, up, down = (tensors[f"e.{expert}.{n}_proj.weight"] for n in ("gate", "up", "down"))
            row += w * (down @ (F.silu(gate @ x[token]) * (up @ x[token])))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("choice", ["spread", "one expert", "last expert only"])
def test_experts_equal_a_loop_over_tokens(tensors, fuse, choice):
    x, index, weight = routed()
    if choice == "one expert":
        index = torch.zeros_like(index)
    elif choice == "last expert only":
        index = torch.full_like(index, E - 1)
    experts = Experts.from_checkpoint(tensors, "e.", E, fuse=fuse)
    torch.testing.assert_close(experts(x, index, weight), loop(tensors, x, index, weight), atol=1e-5, rtol=1e-5)


def test_bfloat16_experts_stay_close_and_keep_the_dtype(tensors):
    x, index, weight = routed()
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    y = Experts.from_checkpoint(half, "e.", E, fuse=True)(x.bfloat16(), index, weight)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), loop(tensors, x, index, weight), atol=0.03, rtol=0.05)


def test_a_token_does_not_depend_on_the_others(tensors):
    x, index, weight = routed()
    experts = Experts.from_checkpoint(tensors, "e.", E, fuse=True)
    alone = torch.cat([experts(x[i : i + 1], index[i : i + 1], weight[i : i + 1]) for i in range(N)])
    torch.testing.assert_close(experts(x, index, weight), alone, atol=1e-6, rtol=1e-5)


def test_nothing_is_read_to_the_host(tensors, no_host_reads):
    x, index, weight = routed()
    experts = Experts.from_checkpoint(tensors, "e.", E, fuse=True)
    with no_host_reads():
        experts(x, index, weight)
    with no_host_reads(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        x.sum().item()

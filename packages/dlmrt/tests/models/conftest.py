"""Golden reference models: `dlmrt/tests/golden/<name>` holds a checkpoint and what the reference computed with it."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

GOLDEN = Path(__file__).parents[1] / "golden"
HOST_READS = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "equal",
        "nonzero",
        "masked_select",
        "_unique2",
        "bincount",
    )
}


class NoHostReads(TorchDispatchMode):
    """Fails on operations that read a value to the host or whose result's shape depends on data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        assert name not in HOST_READS, name
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="session")
def no_host_reads() -> type[NoHostReads]:
    return NoHostReads


@dataclass(frozen=True)
class Golden:
    """raw: config.json; tensors: weights; values: recorded inputs and outputs; meta: how they were made."""

    folder: Path
    raw: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]
    meta: dict[str, Any]


@cache
def load_golden(name: str) -> Golden:
    folder = GOLDEN / name
    return Golden(
        folder,
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
        load_file(folder / "golden.safetensors"),
        json.loads((folder / "meta.json").read_text()),
    )


@pytest.fixture(scope="session")
def llada2_golden() -> Golden:
    return load_golden("llada2_moe_tiny")


@pytest.fixture(scope="session")
def diffusion_gemma_golden() -> Golden:
    return load_golden("diffusion_gemma_tiny")

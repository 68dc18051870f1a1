"""Tiny models, a small tokenizer and settings of runs that last milliseconds."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer

from orl_train import pretrain
from orl_train.bench.workload import Workload, random_workload
from orl_train.config import build_config
from orl_train.pretrain import PretrainConfig

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach the network
os.environ["TOKENIZERS_PARALLELISM"] = "false"

TEXTS = 300


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The arithmetic tokenizer from few texts."""
    return pretrain.arithmetic_tokenizer(0, TEXTS)


@pytest.fixture
def small_workload() -> Callable[..., Workload]:
    """random_workload(prompts, ..) on a QwenDLM of a few thousand weights."""
    shape = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "residual_intermediate_size": 16,
        "canvas_length": 4,
    }
    return partial(random_workload, context=12, steps=3, **shape)


@pytest.fixture
def quick_start(monkeypatch):
    """Training runs of this process build their tokenizer from few texts, and share no state through accelerate."""
    monkeypatch.setattr(pretrain, "arithmetic_tokenizer", partial(pretrain.arithmetic_tokenizer, texts=TEXTS))
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def tiny_run() -> Callable[..., PretrainConfig]:
    """Settings of a tiny run; keywords override them, those of the model with a leading `model_`."""

    def build(**overrides: Any) -> PretrainConfig:
        shape = {
            "hidden_size": 32,
            "layers": 2,
            "heads": 2,
            "kv_heads": 1,
            "intermediate_size": 48,
            "residual_intermediate_size": 32,
            "canvas_length": 16,
        }
        shape |= {name[6:]: value for name, value in overrides.items() if name.startswith("model_")}
        settings = {"steps": 6, "batch_size": 4, "micro_batch_size": 2, "save_every": 2, "precision": "no"}
        settings |= {name: value for name, value in overrides.items() if not name.startswith("model_")}
        return build_config(PretrainConfig, settings | {"model": shape}, "tiny run")

    return build

"""Tiny start models whose random answers end, so that a run can be driven by a verifier of the test's own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer

from orl_train.config import build_config
from orl_train.models.qwen_dlm import QwenDLMConfig, QwenDLMForBlockDiffusion
from orl_train.orl import OrlConfig
from orl_train.saving import save_model

CANVAS = 8


def start_model(family: str, vocab_size: int) -> QwenDLMForBlockDiffusion:
    torch.manual_seed(0)
    model = QwenDLMForBlockDiffusion(
        QwenDLMConfig(
            vocab_size=vocab_size,
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=12,
            max_position_embeddings=160,
            canvas_length=CANVAS,
            state_family=family,
            mask_token_id=2 if family == "masked" else None,
            residual_intermediate_size=16,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.15)
        model.model.embed_tokens.weight[1] *= 8  # the end token is likely at about half of the positions
    return model


@pytest.fixture
def start(tmp_path: Path, tokenizer: Tokenizer) -> Callable[[str], Path]:
    """Writes the start model of a family and returns its folder."""

    def write(family: str) -> Path:
        folder = tmp_path / f"start-{family}"
        folder.mkdir()
        save_model(start_model(family, tokenizer.get_vocab_size()), tokenizer, folder, torch.float32)
        return folder

    return write


@pytest.fixture
def settings() -> Callable[..., OrlConfig]:
    """Settings of a run of milliseconds; keywords override them, with __ for a table: loss__kl_weight=0.0."""

    def build(start: Path, **overrides) -> OrlConfig:
        data: dict = {
            "start": str(start),
            "updates": 3,
            "save_every": 1,
            "keep": 5,
            "evaluate_every": 0,
            "rollout": {
                "prompts": 4,
                "max_new_tokens": 24,
                "max_steps": 5,
                "low": 0.05,
                "high": 0.5,
                "temperature": 0.7,
            },
        }
        for name, value in overrides.items():
            table, _, key = name.rpartition("__")
            (data.setdefault(table, {}) if table else data)[key] = value
        return build_config(OrlConfig, data, "test")

    return build


@pytest.fixture(autouse=True)
def fresh_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)

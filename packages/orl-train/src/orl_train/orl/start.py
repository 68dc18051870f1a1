"""What a run starts from: the trainable model of a folder, its tokenizer, and the frozen reference."""

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from orl_core.errors import ConfigError
from orl_train import checkpoint
from orl_train.attention.interface import NAME
from orl_train.lora import StartModel, has_lora
from orl_train.model_folder import model_folder
from orl_train.models import TRAINABLE, QwenDLMForBlockDiffusion
from orl_train.orl.config import OrlConfig
from orl_train.saving import no_progress_bars


def load_model(folder: Path) -> Any:
    """The trainable model of a folder, in float32, by the `model_type` of its config.json.

    Raises ConfigError if the folder holds no model or one of a type that is not trainable, CheckpointError if
    config.json is damaged.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{str(folder)!r} holds no model: there is no config.json; give a model folder")
    kind = checkpoint.read_json(folder / "config.json").get("model_type")
    if kind not in TRAINABLE:
        advice = "; `orl-train convert` makes a qwen_dlm of it" if kind == "qwen3" else ""
        raise ConfigError(f"{folder} has model_type {kind!r}; trainable are {', '.join(TRAINABLE)}{advice}")
    model_class = TRAINABLE[kind]
    attention = NAME if kind == "qwen_dlm" else "sdpa"
    with no_progress_bars():
        return model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)


def check_method(config: OrlConfig, model: Any) -> None:
    """Raises ConfigError for a control on a model that it cannot train: its noise is that of QwenDLM's blocks."""
    if config.method != "orl" and not isinstance(model, QwenDLMForBlockDiffusion):
        raise ConfigError(f"method is {config.method!r}, which trains qwen_dlm models only; use 'orl'")


def check_sharded(config: OrlConfig) -> None:
    """Raises ConfigError for settings that a model in shards does not train with."""
    if config.method != "orl":
        raise ConfigError(f"method is {config.method!r}, which does not run under FSDP2; use 'orl', or no FSDP")
    if config.rollout.engine == "reference":
        raise ConfigError("rollout.engine is 'reference', which does not run under FSDP2; use 'dlmrt'")


def load_tokenizer(folder: Path, model: Any) -> Tokenizer:
    """The start model's tokenizer. Raises ConfigError if it is missing or has more tokens than the model."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"there is no tokenizer.json in {folder}; copy the model's own there")
    tokenizer = Tokenizer.from_file(str(path))
    size, rows = tokenizer.get_vocab_size(), model.config.vocab_size
    if size > rows:
        raise ConfigError(
            f"the tokenizer has {size} tokens but the model {rows} embeddings; use the model's own tokenizer"
        )
    return tokenizer


def reference_model(config: OrlConfig, model: Any) -> Any | None:
    """The frozen reference of the KL, None where its weight is 0. Raises ConfigError for one of another vocabulary.

    It is the start model unless the settings name another: a copy, or the model without its updates under LoRA.
    """
    if config.loss.kl_weight == 0 or config.method != "orl":
        return None
    if config.reference is None:
        return StartModel(model) if has_lora(model) else copy.deepcopy(model).requires_grad_(False).eval()
    reference = load_model(model_folder(config.reference))
    for name in ("vocab_size", "hidden_size", "canvas_length", "state_family"):
        ours, theirs = getattr(model.config, name), getattr(reference.config, name)
        if ours != theirs:
            raise ConfigError(f"the reference model has {name} {theirs} but the start model {ours}; they must agree")
    return reference.requires_grad_(False).eval()


def stop_ids(model: Any) -> frozenset[int]:
    """The tokens that end an answer. Raises ConfigError if the model's config.json names none."""
    found = model.config.eos_token_id
    if found is None:
        raise ConfigError("the start model's config.json has no eos_token_id; answers would never end")
    return frozenset([found] if isinstance(found, int) else found)

"""Checkpoints of random weights in the shape of a model family, for measurements without published weights."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dlmrt.checkpoint.folder import parse_settings
from dlmrt.checkpoint.weights import TensorEntry
from dlmrt.checkpoint.writer import TensorWriter
from dlmrt.errors import CheckpointError
from dlmrt.models.base import ModelConfig

PREFIX = "random:"

_LAYER_TYPES = ["sliding_attention"] * 5 + ["full_attention"]
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
# One period of the published model's layers (five sliding, one full), a small tower that text does not use.
_DIFFUSION_GEMMA: dict[str, Any] = {
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "model_type": "diffusion_gemma",
    "canvas_length": 64,
    "tie_word_embeddings": True,
    "image_token_id": 2047,
    "boi_token_id": 2045,
    "eoi_token_id": 2046,
    "text_config": {
        "model_type": "diffusion_gemma_text",
        "vocab_size": 2048,
        "hidden_size": 192,
        "intermediate_size": 384,
        "moe_intermediate_size": 96,
        "num_experts": 16,
        "top_k_experts": 4,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "per_layer_config": {"5": {"head_dim": 64, "num_key_value_heads": 1}},
        "layer_types": _LAYER_TYPES,
        "sliding_window": 128,
        "max_position_embeddings": 4096,
        "rope_parameters": _ROPE,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 32,
        "head_dim": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "patch_size": 4,
        "pooling_kernel_size": 3,
        "position_embedding_size": 16,
    },
}
_GENERATION: dict[str, Any] = {
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "max_denoising_steps": 16,
    "max_new_tokens": 256,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.5},
}

SHAPES = {"diffusion_gemma": (_DIFFUSION_GEMMA, _GENERATION)}


def write_random(kind: str, folder: Path, seed: int = 0) -> None:
    """Writes config.json, generation_config.json and model.safetensors; float32, no tokenizer."""
    if kind not in SHAPES:
        raise CheckpointError(f"{PREFIX}{kind} is unknown; choose one of {[PREFIX + name for name in SHAPES]}")
    raw, generation = SHAPES[kind]
    config = parse_settings(raw, generation).config
    path = folder / "model.safetensors"
    entries = {
        name: TensorEntry(path, shape, "F32", 4 * torch.Size(shape).numel())
        for name, shape in config.tensor_shapes().items()
    }
    generator = torch.Generator().manual_seed(seed)
    with TensorWriter(path, entries) as writer:
        for name, entry in entries.items():
            writer.write(name, _weight(name, entry.shape, config, generator))
    for name, content in (("config.json", raw), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


def _weight(name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator) -> Tensor:
    """Normal weights for which logits vary by about 4 and a step depends little on rounding in the one before it.

    For that, the norms behind attention and feed-forward part are damped, and the self-conditioning signal is weak.
    """
    noise = torch.randn(shape, generator=generator)
    if "scalar" in name:
        return 0.9 + 0.1 * noise
    if len(shape) == 1:
        damped = "post_attention_layernorm" in name or name.endswith("post_feedforward_layernorm.weight")
        return (0.6 if damped or "q_norm" in name or "k_norm" in name else 1.0) * (1 + 0.1 * noise)
    gain = 4.0 if "embed_tokens" in name else 8.0 if "router" in name else 0.8
    if "self_conditioning.down_proj" in name:
        gain = 0.1
    return noise * gain * config.spec.hidden_size**-0.5


@contextmanager
def random_folder(model: str) -> Iterator[Path]:
    """The temporary folder of a model named "random:KIND"."""
    with TemporaryDirectory(prefix="dlmrt-random-") as name:
        write_random(model.removeprefix(PREFIX), Path(name))
        yield Path(name)

"""Tiny random models, a byte-level tokenizer and checkpoints in the Hugging Face layout."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dlmrt.checkpoint.folder import Defaults
from dlmrt.decoding import DecoderSettings
from dlmrt.engine import Engine
from dlmrt.models.base import BlockModel, BlockSpec
from dlmrt.models.qwen3 import Qwen3Config
from dlmrt.text import TextCodec

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach the network

VOCAB, EOS, PAD, MASK = 264, 256, 257, 258
TEMPLATE = "{{ messages[-1]['content'] + '\\n' }}"


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., dict[str, Any]]:
    """config.json of a two-layer QwenDLM with a canvas of 8 and a context of 96; keywords override it."""

    def build(**overrides: Any) -> dict[str, Any]:
        return {
            "architectures": ["QwenDLMForBlockDiffusion"],
            "model_type": "qwen_dlm",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "hidden_act": "silu",
            "max_position_embeddings": 96,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": False,
            "canvas_length": 8,
            "state_family": "uniform",
            "mask_token_id": None,
            "residual_intermediate_size": 24,
        } | overrides

    return build


@pytest.fixture(scope="session")
def masked_config(tiny_config) -> dict[str, Any]:
    return tiny_config(state_family="masked", mask_token_id=MASK)


@pytest.fixture(scope="session")
def tiny_tensors() -> Callable[..., dict[str, torch.Tensor]]:
    """Random weights for a config.json, scaled so that the logits have a standard deviation of about 3."""

    def build(raw: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in Qwen3Config.from_json(raw).tensor_shapes().items():
            noise = torch.randn(shape, generator=generator)
            if "norm" in name:
                tensors[name] = 1 + 0.1 * noise
            elif "embed_tokens" in name or name == "lm_head.weight":
                tensors[name] = noise * 0.5
            elif "residual_adapter" in name:
                # Weak: a strong random adapter makes the iteration over steps chaotic, and rounding visible in tokens.
                tensors[name] = torch.tensor(0.8) if noise.dim() == 0 else noise * 0.08
            else:
                tensors[name] = noise * 0.25
        return tensors

    return build


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One token per byte (ids 0..255), then <eos>, <pad>, <mask>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<pad>", "<mask>"])
    assert tokenizer.token_to_id("<mask>") == MASK
    return tokenizer


@pytest.fixture(scope="session")
def codec(tokenizer) -> TextCodec:
    return TextCodec(tokenizer, TEMPLATE)


@pytest.fixture(scope="session")
def tiny_engine(tiny_config, tiny_tensors, codec) -> Callable[..., Engine]:
    """An engine over a random model; keywords override the config."""

    def build(*, generation: dict[str, Any] | None = None, seed: int = 0, **overrides: Any) -> Engine:
        raw = tiny_config(**overrides)
        settings = {"eos_token_id": EOS} if generation is None else generation
        return Engine.from_state(raw, tiny_tensors(raw, seed), codec=codec, generation=settings)

    return build


@pytest.fixture(scope="session")
def write_checkpoint(tiny_config, tiny_tensors, tokenizer) -> Callable[..., Path]:
    """Writes a complete checkpoint to a folder; keywords override the config."""

    def write(folder: Path, **overrides: Any) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        raw = tiny_config(**overrides)
        decoder = {"name": "entropy_bound", "max_steps": 6}
        if raw["state_family"] == "masked":
            decoder = {"name": "threshold", "threshold": 0.5}
        generation = {"eos_token_id": EOS, "pad_token_id": PAD, "max_new_tokens": 20, "decoder": decoder}
        (folder / "config.json").write_text(json.dumps(raw))
        (folder / "generation_config.json").write_text(json.dumps(generation))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": TEMPLATE}))
        tokenizer.save(str(folder / "tokenizer.json"))
        save_file(tiny_tensors(raw), folder / "model.safetensors")
        return folder

    return write


@pytest.fixture(scope="session")
def checkpoint(write_checkpoint, tmp_path_factory) -> Path:
    """A complete uniform-family checkpoint; not to be changed."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


class ScriptedModel(BlockModel):
    """Predicts, with near certainty, token `script[position]` at every position. `poisoned`: its logits are NaN."""

    def __init__(self, script: list[int], canvas_length: int, prompt_length: int) -> None:
        self.spec = BlockSpec(
            vocab_size=VOCAB,
            hidden_size=VOCAB,
            canvas_length=canvas_length,
            max_context=128,
            family="uniform",
            mask_token_id=None,
            layout="prompt_end",
            commit="causal",
            has_residual=False,
            kv_layers=((1, 1),),
        )
        self.embedding = self.head = torch.eye(VOCAB)
        padded = [0] * prompt_length + script + [ord("~")] * 256
        self.script, self.poisoned = torch.tensor(padded), False

    @classmethod
    def from_tensors(cls, config, tensors, *, fuse=True):
        raise NotImplementedError

    def encode(self, ids_BT, span, cache):
        self._write(ids_BT, span, cache)

    def denoise(self, ids_BC, z_BCd, receives_BC, span, cache):
        self._write(ids_BC, span, cache)
        hidden = torch.nn.functional.one_hot(self.script[span.positions], VOCAB).float() * 40
        return hidden * float("nan") if self.poisoned else hidden

    def _write(self, ids, span, cache):
        value = torch.full((*ids.shape, 1, 1), float("nan") if self.poisoned else 1.0)
        keys, _ = cache.write(0, value, value, span)
        assert self.poisoned or not keys.isnan().any(), "a request reads what another one has poisoned"


@pytest.fixture(scope="session")
def scripted_engine(codec) -> Callable[..., Engine]:
    """An engine whose answer to the prompt "?" (two tokens) is `text`, then <eos> unless `endless`."""

    def build(text: str, *, canvas_length: int = 8, endless: bool = False, **options: Any) -> Engine:
        script = codec.encode(text) + ([] if endless else [EOS])
        defaults = Defaults(DecoderSettings("entropy_bound"), (EOS,))
        return Engine(ScriptedModel(script, canvas_length, 2), codec, defaults, name="scripted", **options)

    return build

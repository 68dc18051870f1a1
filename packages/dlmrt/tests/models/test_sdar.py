"""SDAR checkpoints (Qwen3 and Qwen3-MoE bodies, masked, aligned blocks) against transformers' own classes."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config as HFConfig
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM
from transformers import Qwen3MoeConfig as HFMoeConfig

from dlmrt.cache import block_causal_span, canvas_span
from dlmrt.errors import ModelConfigError
from dlmrt.models import MODELS
from dlmrt.models.qwen3 import Qwen3, Qwen3Config

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}


def reference(kind: str, normalise: bool = True):
    torch.manual_seed(0)
    if kind == "sdar":
        model = Qwen3ForCausalLM(HFConfig(**SIZES))
    else:
        model = Qwen3MoeForCausalLM(HFMoeConfig(**SIZES, **MOE, norm_topk_prob=normalise))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def saved(model, folder, kind: str):
    """The checkpoint as SDAR publishes it: the body's tensors under its own model_type and class name."""
    model.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    names = {"sdar": "SDARForCausalLM", "sdar_moe": "SDARMoeForCausalLM"}
    return raw | {"model_type": kind, "architectures": [names[kind]], "mask_token_id": 95}, load_file(
        folder / "model.safetensors"
    )


def block_mask(length: int, block: int) -> torch.Tensor:
    position = torch.arange(length)
    return (position // block)[None, :] <= (position // block)[:, None]


@pytest.mark.parametrize(("kind", "normalise"), [("sdar", True), ("sdar_moe", True), ("sdar_moe", False)])
@pytest.mark.parametrize("block", [4, 8])
def test_logits_equal_transformers_under_the_block_mask(tmp_path, kind, normalise, block):
    hf = reference(kind, normalise)
    raw, tensors = saved(hf, tmp_path, kind)
    config = Qwen3Config.from_json(raw)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == config.tensor_shapes()
    ids = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = hf(ids, attention_mask=block_mask(24, block)[None, None].expand(2, 1, 24, 24)).logits
    assert expected.std() > 0.5
    for fuse in (True, False):
        model = Qwen3.from_tensors(config, tensors, fuse=fuse)
        span = block_causal_span([0, 0], 24, block, "cpu")
        logits = model.logits(model.denoise(ids, None, None, span, model.new_cache(2, 24)))
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["sdar", "sdar_moe"])
@pytest.mark.parametrize("prompt", range(1, 10))
def test_cached_context_equals_full_recomputation(tmp_path, kind, prompt):
    raw, tensors = saved(reference(kind), tmp_path, kind)
    model = Qwen3.from_tensors(Qwen3Config.from_json(raw), tensors)
    whole = prompt - prompt % 4
    ids = torch.randint(0, 95, (1, whole + 8), generator=torch.Generator().manual_seed(prompt))
    ids[:, prompt:] = 95
    span = block_causal_span([0], whole + 8, 4, "cpu")
    expected = model.logits(model.denoise(ids, None, None, span, model.new_cache(1, whole + 8)))
    cache = model.new_cache(1, whole + 8)
    if whole:
        model.encode(ids[:, :whole], block_causal_span([0], whole, 4, "cpu"), cache)
    for start in (whole, whole + 4):
        block = ids[:, start : start + 4]
        hidden = model.denoise(block, None, None, canvas_span([start], [4], 4, "cpu"), cache)
        torch.testing.assert_close(model.logits(hidden), expected[:, start : start + 4], atol=1e-4, rtol=0)
        model.encode(block, block_causal_span([start], 4, 4, "cpu"), cache)


def test_published_defaults():
    """The published SDAR files name neither block nor mask token."""
    raw = SIZES | {"vocab_size": 151936, "hidden_act": "silu", "model_type": "sdar", "rope_theta": 1000000}
    config = Qwen3Config.from_json(raw)
    assert (config.canvas_length, config.mask_token_id, config.rope_theta) == (4, 151669, 1e6)
    spec = config.spec
    assert (spec.family, spec.layout, spec.commit) == ("masked", "aligned", "block_causal")
    assert Qwen3Config.from_json(raw | {"block_size": 16}).canvas_length == 16
    assert {MODELS[kind] for kind in ("sdar", "sdar_moe", "qwen3", "qwen3_moe", "qwen_dlm")} == {Qwen3}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ({"mlp_only_layers": ["1"]}, "mlp_only_layers"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
    ],
)
def test_expert_settings_that_cannot_be_honoured_are_refused_by_name(change, named):
    raw = SIZES | MOE | {"hidden_act": "silu", "model_type": "sdar_moe", "mask_token_id": 95}
    assert Qwen3Config.from_json(raw).moe is not None
    with pytest.raises(ModelConfigError, match=named):
        Qwen3Config.from_json(raw | change)

"""The Qwen3 denoiser against golden/qwen3_tiny and transformers' Qwen3ForCausalLM."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dlmrt.cache import block_causal_span, canvas_span, causal_span
from dlmrt.errors import ModelConfigError
from dlmrt.models.qwen3 import Qwen3, Qwen3Config
from orl_core.residual import ResidualAdapter

FOLDER = Path(__file__).parents[1] / "golden" / "qwen3_tiny"
BLOCK = 8


@pytest.fixture(scope="module")
def golden():
    return load_file(FOLDER / "golden.safetensors")


@pytest.fixture(scope="module", params=[True, False], ids=["fused", "shared"])
def model(request) -> Qwen3:
    config = Qwen3Config.from_json(json.loads((FOLDER / "config.json").read_text()))
    return Qwen3.from_tensors(config, load_file(FOLDER / "model.safetensors"), fuse=request.param)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def logits(model, ids, span, cache):
    return model.logits(model.denoise(ids, None, None, span, cache))


def test_causal_logits_equal_the_golden(model, golden):
    ids = golden["clean_ids"]
    close(logits(model, ids, causal_span([0], 40, "cpu"), model.new_cache(1, 40)), golden["causal/logits"])


def test_noisy_blocks_after_causal_commits_equal_the_staircase_golden(model, golden):
    cache = model.new_cache(1, 40)
    for start in range(0, 40, BLOCK):
        noisy = golden["noisy_ids"][:, start : start + BLOCK]
        got = logits(model, noisy, canvas_span([start], [BLOCK], BLOCK, "cpu"), cache)
        close(got, golden["staircase/logits"][:, 40 + start : 40 + start + BLOCK])
        model.encode(golden["clean_ids"][:, start : start + BLOCK], causal_span([start], BLOCK, "cpu"), cache)


def test_noisy_blocks_after_block_causal_commits_equal_the_golden(model, golden):
    cache = model.new_cache(1, 40)
    for start in range(0, 40, BLOCK):
        noisy = golden["noisy_ids"][:, start : start + BLOCK]
        got = logits(model, noisy, canvas_span([start], [BLOCK], BLOCK, "cpu"), cache)
        close(got, golden["staircase_blockcausal/logits"][:, 40 + start : 40 + start + BLOCK])
        clean = golden["clean_ids"][:, start : start + BLOCK]
        model.encode(clean, block_causal_span([start], BLOCK, BLOCK, "cpu"), cache)


def test_cached_keys_equal_the_golden_whether_written_at_once_or_in_pieces(model, golden):
    ids = golden["clean_ids"][:, :16]
    whole, pieces = model.new_cache(1, 16), model.new_cache(1, 16)
    model.encode(ids, causal_span([0], 16, "cpu"), whole)
    for start, length in ((0, 5), (5, 1), (6, 10)):
        model.encode(ids[:, start : start + length], causal_span([start], length, "cpu"), pieces)
    for layer in range(3):
        for cache in (whole, pieces):
            close(cache.k[layer].transpose(1, 2), golden[f"kv16/layer{layer}/keys"])
            close(cache.v[layer].transpose(1, 2), golden[f"kv16/layer{layer}/values"])


def test_rows_with_different_contexts_equal_the_golden_and_ignore_what_lies_beyond(model, golden):
    cache = model.new_cache(2, 48)
    model.encode(golden["clean_ids"].repeat(2, 1), causal_span([0, 0], 40, "cpu"), cache)
    noisy = torch.cat([golden["noisy_ids"][:, 16:24], golden["noisy_ids"][:, 32:40]])
    got = logits(model, noisy, canvas_span([16, 32], [BLOCK, BLOCK], BLOCK, "cpu"), cache)
    close(got[:1], golden["kv/block2_logits"])
    close(got[1:], golden["kv/block4_logits"])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("top_level_theta", [True, False])
def test_causal_logits_equal_transformers(tied, top_level_theta):
    from transformers import Qwen3Config as ReferenceConfig
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    settings = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
    theta = {"rope_theta": 500.0, "rope_type": "default"}
    reference = Qwen3ForCausalLM(ReferenceConfig(**settings, tie_word_embeddings=tied, rope_parameters=theta)).eval()
    raw = reference.config.to_dict()
    if top_level_theta:
        raw |= {"rope_theta": 500.0, "rope_parameters": None}
    config = Qwen3Config.from_json(raw)
    ours = Qwen3.from_tensors(config, reference.state_dict())
    ids = torch.randint(40, (2, 12))
    with torch.no_grad():
        close(logits(ours, ids, causal_span([0, 0], 12, "cpu"), ours.new_cache(2, 12)), reference(ids).logits)


def test_residual_is_added_to_the_embedding_of_receiving_positions(tiny_config, tiny_tensors):
    raw = tiny_config()
    tensors = tiny_tensors(raw)
    config = Qwen3Config.from_json(raw)
    model, plain = Qwen3.from_tensors(config, tensors), dict(tensors)
    ids, z = torch.arange(8)[None], torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(1))
    receives = torch.arange(8)[None] % 2 == 0
    adapter = ResidualAdapter(32, 24)
    adapter.load_state_dict({n.removeprefix("residual_adapter."): t for n, t in tensors.items() if "adapter" in n})
    # The same thing with the residual baked into an embedding table of its own.
    with torch.no_grad():
        plain["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        plain["model.embed_tokens.weight"][:8] += torch.where(receives[0, :, None], adapter(z)[0], torch.tensor(0.0))
    span = canvas_span([0], [8], 8, "cpu")
    got = model.denoise(ids, z, receives, span, model.new_cache(1, 8))
    baked = Qwen3.from_tensors(config, plain)
    close(got, baked.denoise(ids, None, None, span, baked.new_cache(1, 8)))
    close(
        model.denoise(ids, z, torch.zeros_like(receives), span, model.new_cache(1, 8)),
        model.denoise(ids, None, None, span, model.new_cache(1, 8)),
    )


def test_unfused_model_shares_every_tensor(tiny_config, tiny_tensors):
    raw = tiny_config()
    tensors = tiny_tensors(raw)
    model = Qwen3.from_tensors(Qwen3Config.from_json(raw), tensors, fuse=False)
    ids, span = torch.arange(8)[None], canvas_span([0], [8], 8, "cpu")
    z, everywhere = torch.ones(1, 8, 32), torch.ones(1, 8, dtype=torch.bool)
    outputs = []
    for name in sorted(tensors):
        before = model.logits(model.denoise(ids, z, everywhere, span, model.new_cache(1, 8)))
        tensors[name].mul_(1.5)
        after = model.logits(model.denoise(ids, z, everywhere, span, model.new_cache(1, 8)))
        outputs.append(torch.equal(before, after))
    assert not any(outputs)


def test_plain_qwen3_config_is_a_uniform_model_without_adapter():
    raw = json.loads((FOLDER / "config.json").read_text())
    spec = Qwen3Config.from_json(raw).spec
    assert (spec.family, spec.mask_token_id, spec.has_residual, spec.canvas_length) == ("uniform", None, False, 32)
    assert (spec.layout, spec.commit, spec.max_context) == ("prompt_end", "causal", 512)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_parameters.rope_theta"),
        ({"rope_parameters": 3}, "rope_parameters"),
        ({"state_family": "gaussian"}, "state_family"),
        ({"state_family": "masked"}, "mask_token_id"),
        ({"state_family": "masked", "mask_token_id": 264}, "mask_token_id"),
        ({"canvas_length": 0}, "canvas_length"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_config_that_cannot_be_honoured_is_refused_by_key(tiny_config, change, named):
    with pytest.raises(ModelConfigError, match=named):
        Qwen3Config.from_json(tiny_config(**change))

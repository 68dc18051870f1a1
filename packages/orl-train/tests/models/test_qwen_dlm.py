"""The trainable QwenDLM against transformers' Qwen3 and the reference tensors of `dlmrt/tests/golden/qwen3_tiny`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, Qwen3ForCausalLM

from orl_core.errors import ConfigError
from orl_core.protocols import Denoiser
from orl_core.visibility import staircase
from orl_train.models.qwen_dlm import QwenDLMConfig, QwenDLMForBlockDiffusion, causal_mask, count_parameters
from orl_train.saving import no_progress_bars

GOLDEN = Path(__file__).parents[3] / "dlmrt" / "tests" / "golden" / "qwen3_tiny"


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "golden.safetensors")


def build(**overrides) -> QwenDLMForBlockDiffusion:
    """The golden model's shape and weights, and an untrained adapter."""
    raw = json.loads((GOLDEN / "config.json").read_text()) | {"model_type": "qwen_dlm"}
    model = QwenDLMForBlockDiffusion(QwenDLMConfig.from_dict(raw | overrides))
    missing, unexpected = model.load_state_dict(load_file(GOLDEN / "model.safetensors"), strict=False)
    assert not unexpected
    assert all(name.startswith("residual_adapter.") or name == "lm_head.weight" for name in missing)
    return model.eval()


def trained_adapter(model: QwenDLMForBlockDiffusion) -> QwenDLMForBlockDiffusion:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.residual_adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def residual_inputs(model, ids):
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(*ids.shape, model.config.hidden_size, generator=generator)
    return z, torch.rand(ids.shape, generator=generator) < 0.5


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_causal_logits_equal_the_reference(golden, attention):
    model = build(attn_implementation=attention)
    ids = golden["clean_ids"]
    with torch.no_grad():
        logits = model.denoise(ids, torch.arange(40)[None], causal_mask(40))
    torch.testing.assert_close(logits, golden["causal/logits"], atol=1e-4, rtol=0)


def test_causal_logits_equal_transformers(golden):
    with no_progress_bars():
        reference = Qwen3ForCausalLM.from_pretrained(GOLDEN, dtype=torch.float32).eval()
    ids = golden["noisy_ids"]
    with torch.no_grad():
        logits = build().denoise(ids, torch.arange(40)[None], causal_mask(40))
        torch.testing.assert_close(logits, reference(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_staircase_logits_equal_the_reference(golden, attention):
    visibility = staircase(40, 0, 8)
    mask = visibility.dense_mask()[None]
    assert torch.equal(mask, golden["staircase/mask_allowed"][0])
    model = build(attn_implementation=attention)
    with torch.no_grad():
        logits = model(golden["staircase/input_ids"], visibility.position[None], mask)
    torch.testing.assert_close(logits, golden["staircase/logits"], atol=1e-4, rtol=0)


def test_an_untrained_adapter_changes_nothing(golden):
    ids, positions = golden["clean_ids"], torch.arange(40)[None]
    plain, model = build(), build(residual_intermediate_size=24)
    z, receives = residual_inputs(model, ids)
    with torch.no_grad():
        expected = plain.denoise(ids, positions, causal_mask(40))
        assert torch.equal(model.denoise(ids, positions, causal_mask(40), z, receives), expected)
        assert torch.equal(plain.denoise(ids, positions, causal_mask(40), z, receives), expected)


def test_a_trained_adapter_acts_only_where_it_is_received(golden):
    ids, positions, mask = golden["clean_ids"], torch.arange(40)[None], causal_mask(40)
    model = trained_adapter(build(residual_intermediate_size=24))
    z, _ = residual_inputs(model, ids)
    receives = torch.zeros(1, 40, dtype=torch.bool)
    with torch.no_grad():
        expected = model.denoise(ids, positions, mask)
        assert torch.equal(model.denoise(ids, positions, mask, z, receives), expected)
        receives[0, 20] = True
        changed = model.denoise(ids, positions, mask, z, receives)
    assert torch.equal(changed[:, :20], expected[:, :20])
    assert (changed[:, 20:] - expected[:, 20:]).abs().amax(-1).min() > 1e-4


def test_no_gradient_flows_into_the_residual_context(golden):
    model = trained_adapter(build(residual_intermediate_size=24))
    ids = golden["clean_ids"]
    z, receives = residual_inputs(model, ids)
    z.requires_grad_()
    model.denoise(ids, torch.arange(40)[None], causal_mask(40), z, receives).sum().backward()
    assert z.grad is None
    assert model.residual_adapter.alpha.grad.abs() > 0


@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load(tmp_path, tied):
    torch.manual_seed(0)
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 40, "residual_intermediate_size": 24}
    config |= {"state_family": "masked", "mask_token_id": 3, "canvas_length": 8, "tie_word_embeddings": tied}
    model = trained_adapter(QwenDLMForBlockDiffusion(QwenDLMConfig(**config)))
    with no_progress_bars():
        model.save_pretrained(tmp_path)
        loaded = [kind.from_pretrained(tmp_path) for kind in (QwenDLMForBlockDiffusion, AutoModel)]
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {f"residual_adapter.{part}" for part in ("alpha", "norm.weight", "down_proj.weight")} <= names
    assert ("lm_head.weight" in names) is not tied
    for again in loaded:
        assert type(again) is QwenDLMForBlockDiffusion
        assert (again.family, again.config.mask_token_id, again.config.canvas_length) == ("masked", 3, 8)
        assert (again.lm_head.weight is again.embedding) is tied
        for name, tensor in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name


def test_gradient_checkpointing_changes_nothing(golden):
    results = []
    for checkpointing in (False, True):
        model = trained_adapter(build(residual_intermediate_size=24)).train()
        if checkpointing:
            model.activation_checkpointing_enable()
            assert model.is_activation_checkpointing
        ids = golden["clean_ids"]
        z, receives = residual_inputs(model, ids)
        logits = model.denoise(ids, torch.arange(40)[None], causal_mask(40), z, receives)
        logits.square().mean().backward()
        results.append((logits, {name: p.grad for name, p in model.named_parameters()}))
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, rtol=0, atol=1e-7, msg=name)


def test_it_is_a_denoiser():
    model = build(residual_intermediate_size=24)
    assert isinstance(model, Denoiser)
    adapter = sum(p.numel() for p in model.residual_adapter.parameters())
    assert count_parameters(model) - adapter == count_parameters(build())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"state_family": "absorbing"}, "state_family is 'absorbing'; it must be 'uniform' or 'masked'"),
        ({"canvas_length": 0}, "canvas_length is 0; it must be at least 1"),
        ({"state_family": "masked"}, "state_family is 'masked' but mask_token_id is not set"),
    ],
)
def test_contradicting_fields_are_named(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build(**overrides)

"""The trainable LLaDA2.x twin against the reference tensors of `dlmrt/tests/golden/llada2_moe_tiny`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from orl_core.errors import ConfigError, ShapeError
from orl_core.protocols import Denoiser
from orl_core.visibility import staircase
from orl_train.attention import attention_plan
from orl_train.models.llada2 import LLaDA2MoeModelLM
from orl_train.models.llada2_config import LLaDA2MoeConfig

GOLDEN = Path(__file__).parents[3] / "dlmrt" / "tests" / "golden" / "llada2_moe_tiny"


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture(scope="module")
def model() -> LLaDA2MoeModelLM:
    return LLaDA2MoeModelLM.from_pretrained(GOLDEN, dtype=torch.float32).eval()


def tiny_with_residual() -> LLaDA2MoeModelLM:
    config = LLaDA2MoeConfig.from_pretrained(GOLDEN, residual_intermediate_size=24)
    torch.manual_seed(0)
    return LLaDA2MoeModelLM(config)


@pytest.mark.parametrize("block", ["b8", "b16", "b48", "causal"])
def test_logits_equal_the_reference_under_each_block_mask(model, golden, block):
    causal = torch.ones(48, 48, dtype=torch.bool).tril()
    mask = golden.get(f"forward/{block}/mask_allowed", causal)
    with torch.no_grad():
        logits = model(golden["forward/input_ids"], golden["forward/position_ids"], mask)
    torch.testing.assert_close(logits, golden[f"forward/{block}/logits"], atol=1e-4, rtol=0)


def test_a_plan_gives_the_logits_of_its_dense_mask(model):
    visibility = staircase(40, 16, 8, block_causal=True)
    ids = torch.randint(0, 320, (1, 64), generator=torch.Generator().manual_seed(0))
    plan = attention_plan(visibility, batch=1, device=torch.device("cpu"))
    rows = torch.tensor([3, 41, 60])
    with torch.no_grad():
        dense = model(ids, visibility.position[None], visibility.dense_mask())
        sparse = model(ids, visibility.position[None], plan, rows=rows)
    torch.testing.assert_close(sparse, dense[0, rows], atol=1e-5, rtol=0)


def test_each_layer_equals_the_reference(model, golden):
    attention_outputs = []
    hooks = [
        layer.attention.register_forward_hook(lambda _m, _i, output: attention_outputs.append(output))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        embeds = model.model.word_embeddings(golden["forward/input_ids"])
        mask = golden["forward/b8/mask_allowed"].expand(1, 1, 48, 48)
        hidden = model.model(embeds, mask, golden["forward/position_ids"]).hidden_states
    for hook in hooks:
        hook.remove()
    for i in range(3):
        torch.testing.assert_close(
            attention_outputs[i], golden[f"forward/b8/layer{i}/attention_output"], atol=1e-4, rtol=0
        )
        torch.testing.assert_close(hidden[i + 1], golden[f"forward/b8/layer{i}/output"], atol=1e-4, rtol=0)


def test_router_choices_equal_the_reference_exactly(model, golden):
    routed = {}
    hooks = [
        model.model.layers[i].mlp.gate.register_forward_hook(lambda _m, _i, output, i=i: routed.update({i: output}))
        for i in (1, 2)
    ]
    with torch.no_grad():
        model(golden["forward/input_ids"], golden["forward/position_ids"], golden["forward/b8/mask_allowed"])
    for hook in hooks:
        hook.remove()
    for i, (index, weight, logits) in routed.items():
        prefix = f"forward/b8/layer{i}/router_"
        assert torch.equal(index, golden[f"{prefix}topk_idx"])
        torch.testing.assert_close(weight, golden[f"{prefix}topk_weight"], atol=1e-4, rtol=0)
        torch.testing.assert_close(logits, golden[f"{prefix}logits"], atol=1e-4, rtol=0)
    assert sorted(routed) == [1, 2]


def test_expert_bias_and_group_limit_change_the_choice(model, golden):
    gate = model.model.layers[1].mlp.gate
    x = golden["forward/b8/layer0/output"][0]
    chosen = gate(x)[0]
    unlimited = (x @ gate.weight.T).sigmoid().topk(gate.top_k).indices
    assert not torch.equal(chosen.sort(-1).values, unlimited.sort(-1).values)
    groups = (chosen // (16 // gate.groups)).sort(-1).values
    assert all(len(set(row.tolist())) <= gate.kept_groups for row in groups)


def test_saved_checkpoint_has_the_published_layout(model, tmp_path):
    model.save_pretrained(tmp_path)
    saved, published = load_file(tmp_path / "model.safetensors"), load_file(GOLDEN / "model.safetensors")
    assert saved.keys() == published.keys()
    assert all(torch.equal(saved[name], published[name]) for name in published)
    config, original = (
        json.loads((tmp_path / "config.json").read_text()),
        json.loads((GOLDEN / "config.json").read_text()),
    )
    for key in ("model_type", "architectures", "rope_theta", "partial_rotary_factor", "num_experts", "eos_token_id"):
        assert config[key] == original[key], key


def test_checkpoint_with_residual_adapter_round_trips(tmp_path):
    model = tiny_with_residual()
    with torch.no_grad():
        model.residual_adapter.down_proj.weight.normal_()
        model.residual_adapter.alpha.fill_(0.5)
    model.save_pretrained(tmp_path)
    again = LLaDA2MoeModelLM.from_pretrained(tmp_path)
    assert {name for name in again.state_dict() if name.startswith("residual_adapter.")} == {
        f"residual_adapter.{part}"
        for part in ("alpha", "norm.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight")
    }
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_base_checkpoint_gains_an_adapter_that_changes_nothing(model, golden):
    grown = LLaDA2MoeModelLM.from_pretrained(GOLDEN, residual_intermediate_size=24, dtype=torch.float32).eval()
    ids, mask = golden["forward/input_ids"], golden["forward/b8/mask_allowed"]
    z = torch.randn(1, 48, 64, generator=torch.Generator().manual_seed(1))
    everywhere = torch.ones(1, 48, dtype=torch.bool)
    with torch.no_grad():
        with_z = grown.denoise(ids, golden["forward/position_ids"], mask, z, everywhere)
    assert grown.residual_adapter.alpha.item() == 1.0
    torch.testing.assert_close(with_z, golden["forward/b8/logits"], atol=1e-4, rtol=0)


def test_residual_reaches_only_its_receivers():
    model = tiny_with_residual().eval()
    with torch.no_grad():
        model.residual_adapter.down_proj.weight.normal_(std=0.5)
    ids, positions = torch.arange(12)[None], torch.arange(12)[None]
    alone = torch.eye(12, dtype=torch.bool)
    z = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(1))
    receives = torch.arange(12)[None] % 3 == 0
    with torch.no_grad():
        plain = model.denoise(ids, positions, alone)
        with_z = model.denoise(ids, positions, alone, z, receives)
    changed = (plain - with_z).abs().amax(-1) > 1e-3
    assert torch.equal(changed, receives)


def test_gradients_reach_every_expert_router_and_adapter():
    model = tiny_with_residual()
    with torch.no_grad():
        model.residual_adapter.down_proj.weight.normal_(std=0.1)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 320, (2, 64), generator=generator)
    mask = staircase(64, 16, 8, block_causal=True).dense_mask()[:64, :64]
    z = torch.randn(2, 64, 64, generator=generator, requires_grad=True)
    logits = model.denoise(ids, torch.arange(64).expand(2, 64), mask, z, torch.ones(2, 64, dtype=torch.bool))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None]
    assert silent == []
    experts = model.model.layers[1].mlp.experts
    assert all(expert.down_proj.weight.grad.abs().sum() > 0 for expert in experts)
    assert model.model.layers[2].mlp.gate.weight.grad.abs().sum() > 0
    assert model.residual_adapter.alpha.grad.abs() > 0
    assert z.grad is None


def test_gradient_checkpointing_changes_no_gradient():
    model = tiny_with_residual().train()
    ids, positions, mask = torch.arange(16)[None], torch.arange(16)[None], torch.ones(16, 16, dtype=torch.bool)
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.activation_checkpointing_enable()
        model.denoise(ids, positions, mask).square().mean().backward()
        gradients.append(model.model.layers[1].mlp.experts[0].up_proj.weight.grad.clone())
    torch.testing.assert_close(*gradients, atol=0, rtol=0)


def test_model_is_a_denoiser(model):
    assert isinstance(model, Denoiser)
    assert (model.family, model.embedding.shape) == ("masked", (320, 64))


def test_mask_id_defaults_to_the_published_one_where_the_vocabulary_has_it():
    assert LLaDA2MoeConfig().mask_token_id == 156895
    assert LLaDA2MoeConfig(vocab_size=320).mask_token_id is None
    assert LLaDA2MoeConfig(vocab_size=320, mask_token_id=318).mask_token_id == 318


def test_wrong_input_gets_an_error_that_says_what_is_right(model):
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ShapeError, match="block mask"):
        model(ids, ids, torch.ones(1, 4, dtype=torch.int64))
    with pytest.raises(ConfigError, match="state_family"):
        LLaDA2MoeConfig(state_family="uniform")
    with pytest.raises(ConfigError, match="rope_scaling"):
        LLaDA2MoeConfig(rope_scaling={"type": "yarn"})
    with pytest.raises(ConfigError, match="score_function"):
        LLaDA2MoeConfig(score_function="softmax")
    with pytest.raises(ConfigError, match="n_group"):
        LLaDA2MoeConfig(num_experts=10, n_group=4)


def test_the_engine_computes_the_same_from_the_shared_tensors(tmp_path):
    pytest.importorskip("dlmrt", reason="the engine is an optional dependency (orl-train[engine])")
    from dlmrt.cache import block_causal_span
    from dlmrt.engine import Engine

    model = tiny_with_residual().eval()
    with torch.no_grad():
        model.residual_adapter.down_proj.weight.normal_(std=0.5)
    model.config.mask_token_id, model.config.canvas_length = 318, 8
    model.save_pretrained(tmp_path)
    engine = Engine.from_state(json.loads((tmp_path / "config.json").read_text()), model.state_dict()).model
    generator = torch.Generator().manual_seed(4)
    ids, z = torch.randint(0, 320, (2, 24), generator=generator), torch.randn(2, 24, 64, generator=generator)
    receives = torch.rand(2, 24, generator=generator) < 0.5
    block = torch.arange(24) // 8
    mask = block[None, :] <= block[:, None]
    span = block_causal_span([0, 0], 24, 8, "cpu")
    with torch.no_grad():
        ours = model.denoise(ids, torch.arange(24).expand(2, 24), mask, z, receives)
        theirs = engine.logits(engine.denoise(ids, z, receives, span, engine.new_cache(2, 24)))
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)

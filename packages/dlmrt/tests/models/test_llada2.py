"""The LLaDA2.x denoiser against the reference tensors of golden/llada2_moe_tiny."""

import pytest
import torch

from dlmrt.cache import block_causal_span, canvas_span, causal_span
from dlmrt.errors import ModelConfigError
from dlmrt.models import llada2
from dlmrt.models.llada2 import LLaDA2, LLaDA2Config

MASK = 318


def config(golden, **changes) -> LLaDA2Config:
    return LLaDA2Config.from_json(golden.raw | {"mask_token_id": MASK, "canvas_length": 8} | changes)


@pytest.fixture(scope="module")
def model(llada2_golden) -> LLaDA2:
    return LLaDA2.from_tensors(config(llada2_golden), llada2_golden.tensors)


def full_logits(model: LLaDA2, ids, span) -> torch.Tensor:
    return model.logits(model.denoise(ids, None, None, span, model.new_cache(len(ids), span.keys)))


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_checkpoint_tensors_are_those_that_the_config_asks_for(llada2_golden):
    held = {name: tuple(tensor.shape) for name, tensor in llada2_golden.tensors.items()}
    assert held == config(llada2_golden).tensor_shapes()


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("block", [8, 16, 48])
def test_logits_equal_the_reference_under_block_masks(llada2_golden, block, fuse):
    model = LLaDA2.from_tensors(config(llada2_golden), llada2_golden.tensors, fuse=fuse)
    values = llada2_golden.values
    span = block_causal_span([0], 48, block, "cpu")
    close(full_logits(model, values["forward/input_ids"], span), values[f"forward/b{block}/logits"])


def test_logits_equal_the_reference_under_a_causal_mask(model, llada2_golden):
    values = llada2_golden.values
    logits = full_logits(model, values["forward/input_ids"], causal_span([0], 48, "cpu"))
    close(logits, values["forward/causal/logits"])


def test_each_layer_equals_the_reference(model, llada2_golden):
    values = llada2_golden.values
    span = block_causal_span([0], 48, 8, "cpu")
    cache, rotary = model.new_cache(1, 48), model.rotary.at(span)
    x = torch.nn.functional.embedding(values["forward/input_ids"], model.embedding)
    for i, layer in enumerate(model.layers):
        x = layer(x, rotary, span, cache)
        close(x, values[f"forward/b8/layer{i}/output"])


def test_router_choices_equal_the_reference_exactly(model, llada2_golden, monkeypatch):
    chosen = []

    def recording(x, weight, bias, settings):
        chosen.append((torch.nn.functional.linear(x, weight), *route(x, weight, bias, settings)))
        return chosen[-1][1:]

    route = llada2.route
    monkeypatch.setattr(llada2, "route", recording)
    values = llada2_golden.values
    full_logits(model, values["forward/input_ids"], block_causal_span([0], 48, 8, "cpu"))
    assert len(chosen) == 2
    for i, (logits, index, weight) in enumerate(chosen, start=1):
        close(logits, values[f"forward/b8/layer{i}/router_logits"])
        assert torch.equal(index, values[f"forward/b8/layer{i}/router_topk_idx"])
        close(weight, values[f"forward/b8/layer{i}/router_topk_weight"])


def test_cached_keys_and_values_equal_the_reference(model, llada2_golden):
    values = llada2_golden.values
    cache = model.new_cache(1, 48)
    model.encode(values["forward/input_ids"][:, :40], block_causal_span([0], 40, 8, "cpu"), cache)
    for i in range(3):
        close(cache.k[i][:, :40].transpose(1, 2), values[f"kv/layer{i}/keys"])
        close(cache.v[i][:, :40].transpose(1, 2), values[f"kv/layer{i}/values"])
    hidden = model.denoise(values["forward/input_ids"][:, 40:], None, None, canvas_span([40], [8], 8, "cpu"), cache)
    close(model.logits(hidden), values["forward/b8/logits"][:, 40:])


@pytest.mark.parametrize("prompt", range(1, 18))
def test_cached_context_equals_full_recomputation(model, prompt):
    """Whole prompt blocks are cached; the prompt's tail is the fixed part of the first canvas."""
    generator = torch.Generator().manual_seed(prompt)
    tail, whole = prompt % 8, prompt - prompt % 8
    ids = torch.randint(0, 300, (1, whole + 16), generator=generator)
    ids[:, whole + tail :] = MASK
    expected = full_logits(model, ids, block_causal_span([0], whole + 16, 8, "cpu"))
    cache = model.new_cache(1, whole + 16)
    if whole:
        model.encode(ids[:, :whole], block_causal_span([0], whole, 8, "cpu"), cache)
    for start in (whole, whole + 8):
        block = ids[:, start : start + 8]
        for _ in range(2):  # a second step overwrites the keys of the first
            hidden = model.denoise(block, None, None, canvas_span([start], [8], 8, "cpu"), cache)
        close(model.logits(hidden), expected[:, start : start + 8])
        model.encode(block, block_causal_span([start], 8, 8, "cpu"), cache)


def with_adapter(golden):
    generator = torch.Generator().manual_seed(5)
    settings = config(golden, residual_intermediate_size=24)
    adapter = {name: shape for name, shape in settings.tensor_shapes().items() if name.startswith("residual")}
    assert len(adapter) == 5
    tensors = golden.tensors | {name: torch.randn(shape, generator=generator) for name, shape in adapter.items()}
    return LLaDA2.from_tensors(settings, tensors)


def test_residual_reaches_only_its_receivers_and_can_be_left_out(model, llada2_golden):
    grown = with_adapter(llada2_golden)
    assert grown.spec.has_residual
    assert not model.spec.has_residual
    ids = llada2_golden.values["forward/input_ids"][:, 40:]
    z = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(1))
    span = canvas_span([0], [8], 8, "cpu")

    def hidden(m, z, receives):
        return m.denoise(ids, z, receives, span, m.new_cache(1, 8))

    plain = hidden(model, None, None)
    close(hidden(grown, None, None), plain)
    close(hidden(grown, z, torch.zeros(1, 8, dtype=torch.bool)), plain)
    assert (hidden(grown, z, torch.ones(1, 8, dtype=torch.bool)) - plain).abs().max() > 0.1


def test_unfused_model_follows_in_place_updates_of_its_tensors(llada2_golden):
    tensors = {name: tensor.clone() for name, tensor in llada2_golden.tensors.items()}
    model = LLaDA2.from_tensors(config(llada2_golden), tensors, fuse=False)
    ids, span = llada2_golden.values["forward/input_ids"], block_causal_span([0], 48, 8, "cpu")
    before = full_logits(model, ids, span)
    tensors["model.layers.1.mlp.experts.3.up_proj.weight"].mul_(2)
    after = full_logits(model, ids, span)
    assert (after - before).abs().max() > 0.01


def test_config_defaults_are_the_published_ones(llada2_golden):
    raw = llada2_golden.raw | {"vocab_size": 157184}
    published = LLaDA2Config.from_json(raw)
    assert (published.canvas_length, published.mask_token_id) == (32, 156895)
    assert (published.spec.layout, published.spec.commit, published.spec.family) == (
        "aligned",
        "block_causal",
        "masked",
    )
    assert published.rotary_width == 8


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"score_function": "softmax"}, "score_function"),
        ({"use_qkv_bias": True}, "use_qkv_bias"),
        ({"n_group": 5}, "n_group"),
        ({"topk_group": 9}, "topk_group"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"mask_token_id": 320}, "mask_token_id"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(llada2_golden, change, named):
    with pytest.raises(ModelConfigError, match=named):
        config(llada2_golden, **change)

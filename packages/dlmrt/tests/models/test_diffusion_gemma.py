"""The DiffusionGemma denoiser against the reference tensors of golden/diffusion_gemma_tiny."""

import copy

import pytest
import torch

from dlmrt.cache import canvas_span, causal_span
from dlmrt.errors import ModelConfigError
from dlmrt.models.diffusion_gemma import DiffusionGemma
from dlmrt.models.diffusion_gemma_config import DiffusionGemmaConfig

CANVAS = 16


@pytest.fixture(scope="module")
def model(diffusion_gemma_golden) -> DiffusionGemma:
    config = DiffusionGemmaConfig.from_json(diffusion_gemma_golden.raw)
    return DiffusionGemma.from_tensors(config, diffusion_gemma_golden.tensors)


def close(actual, expected, atol=1e-4):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def encoded(model, ids, capacity=96):
    cache = model.new_cache(len(ids), capacity)
    model.encode(ids, causal_span([0] * len(ids), ids.shape[1], "cpu"), cache)
    return cache


def decoder_logits(model, canvas, cache, start, z=None):
    receives = None if z is None else torch.ones_like(canvas, dtype=torch.bool)
    return model.logits(model.denoise(canvas, z, receives, canvas_span([start], [CANVAS], CANVAS, "cpu"), cache))


def run_layers(model, x, span, cache, side):
    """The output of every layer, and what its router chose."""
    rotary = {kind: table.at(span) for kind, table in model.rotary.items()}
    outputs, routed = [], []
    for layer in model.layers:
        router, choices = layer.router, []
        layer.router = lambda x_Nd, router=router, choices=choices: choices.append(router(x_Nd)) or choices[0]
        x = layer(x, rotary, span, cache, getattr(layer, f"{side}_scalar"))
        layer.router = router
        outputs.append(x)
        routed.append(choices[0])
    return outputs, routed


def test_checkpoint_tensors_are_those_that_the_config_asks_for(diffusion_gemma_golden):
    config = DiffusionGemmaConfig.from_json(diffusion_gemma_golden.raw)
    held = {name: tuple(tensor.shape) for name, tensor in diffusion_gemma_golden.tensors.items()}
    wanted = config.tensor_shapes()
    assert wanted == {name: shape for name, shape in held.items() if name in wanted}
    left = held.keys() - wanted.keys()
    assert left
    assert all(config.ignores(name) for name in left)
    assert not config.ignores("model.decoder.layers.0.mlp.surprise.weight")


def test_rotary_frequencies_equal_the_reference(model, diffusion_gemma_golden):
    for attention, table in model.rotary.items():
        kind = "full_attention" if attention.window is None else "sliding_attention"
        close(table.inv_freq, diffusion_gemma_golden.values[f"rope/{kind}/inv_freq"], 1e-7)


def test_encoder_layers_router_and_logits_equal_the_reference(model, diffusion_gemma_golden):
    values = diffusion_gemma_golden.values
    ids = values["prompt_ids"]
    x, cache = model._embed(ids), model.new_cache(1, 64)
    outputs, routed = run_layers(model, x, causal_span([0], ids.shape[1], "cpu"), cache, "encoder")
    for i, (output, (index, weight, prob)) in enumerate(zip(outputs, routed, strict=True)):
        close(output, values[f"encoder/layer{i}/output"])
        assert torch.equal(index, values[f"encoder/layer{i}/router_topk_index"])
        close(weight, values[f"encoder/layer{i}/router_topk_weights"])
        close(prob, values[f"encoder/layer{i}/router_probs"])
    hidden = torch.nn.functional.rms_norm(outputs[-1], (64,), model.norm, 1e-6)
    close(hidden, values["encoder/last_hidden_state"])
    close(model.logits(hidden), values["encoder/logits"])


def test_cached_keys_and_values_equal_the_reference(model, diffusion_gemma_golden):
    values = diffusion_gemma_golden.values
    cache = encoded(model, values["prompt_ids"])
    for i in range(4):
        keys, kept = values[f"encoder/cache{i}/keys"], values[f"encoder/cache{i}/values"]
        first = 21 - keys.shape[2]  # the reference keeps only window - 1 tokens of a sliding layer
        close(cache.k[i][:, first:21].transpose(1, 2), keys)
        close(cache.v[i][:, first:21].transpose(1, 2), kept)


def test_decoder_without_and_with_self_conditioning_equals_the_reference(model, diffusion_gemma_golden):
    values = diffusion_gemma_golden.values
    cache = encoded(model, values["prompt_ids"])
    canvas = values["canvas_ids"]
    close(decoder_logits(model, canvas, cache, 21), values["decoder/nosc/logits"])
    probabilities = values["decoder/sc/self_conditioning_logits"].softmax(-1)
    z = probabilities @ model.embedding * model.embedding_scale
    close(z, values["decoder/sc/soft_embeddings"])
    close(decoder_logits(model, canvas, cache, 21, z), values["decoder/sc/logits"])


@pytest.mark.parametrize("signal", ["nosc", "sc"])
def test_each_decoder_layer_equals_the_reference(model, diffusion_gemma_golden, signal):
    values = diffusion_gemma_golden.values
    cache = encoded(model, values["prompt_ids"])
    span = canvas_span([21], [CANVAS], CANVAS, "cpu")
    outputs, routed = run_layers(model, values[f"decoder/{signal}/input_embeds"], span, cache, "decoder")
    for i, (output, (index, weight, _)) in enumerate(zip(outputs, routed, strict=True)):
        close(output, values[f"decoder/{signal}/layer{i}/output"])
        if signal == "nosc":
            assert torch.equal(index, values[f"decoder/nosc/layer{i}/router_topk_index"])
            close(weight, values[f"decoder/nosc/layer{i}/router_topk_weights"])


def test_no_signal_equals_a_signal_of_zeros(model, diffusion_gemma_golden):
    values = diffusion_gemma_golden.values
    cache = encoded(model, values["prompt_ids"])
    zeros = torch.zeros(1, CANVAS, 64)
    none = decoder_logits(model, values["canvas_ids"], cache, 21)
    assert torch.equal(decoder_logits(model, values["canvas_ids"], cache, 21, zeros), none)


def test_appending_a_canvas_to_the_cache_equals_the_reference_and_a_fresh_prefill(model, diffusion_gemma_golden):
    values = diffusion_gemma_golden.values
    whole = torch.cat([values["prompt_ids"], values["append/ids"]], 1)
    appended = encoded(model, values["prompt_ids"])
    decoder_logits(model, values["canvas_ids"], appended, 21)  # a draft canvas lies where the commit will write
    model.encode(values["append/ids"], causal_span([21], CANVAS, "cpu"), appended)
    for cache in (appended, encoded(model, whole)):
        close(decoder_logits(model, values["canvas_ids"], cache, 37), values["append/decoder_logits"])


def test_rows_of_different_prompts_do_not_see_each_other(model, diffusion_gemma_golden):
    """The reference pads on the left; here each row starts where its own prompt ends."""
    values = diffusion_gemma_golden.values
    prompts, padded = values["generate_c/prompt_ids"], values["generate_c/attention_mask"]
    rows = torch.zeros(2, 21, dtype=torch.int64)
    starts = []
    for row in range(2):
        ids = prompts[row][padded[row].bool()]
        rows[row, : len(ids)] = ids
        starts.append(len(ids))
    assert starts == [21, 13]
    cache = encoded(model, rows)
    canvas = values["canvas_ids"].expand(2, CANVAS)
    span = canvas_span(starts, [CANVAS] * 2, CANVAS, "cpu")
    logits = model.logits(model.denoise(canvas, None, None, span, cache))
    close(logits, values["padded/decoder_logits"])
    close(logits[1:], values["padded/row1_unpadded_decoder_logits"])


@pytest.mark.parametrize("prompt", [1, 11, 12, 13, 15, 16, 17, 40])
def test_cached_context_equals_full_recomputation(model, prompt):
    """Prompts shorter and longer than the window of 12, encoded at once and in two parts."""
    ids = torch.randint(3, 250, (1, prompt + CANVAS), generator=torch.Generator().manual_seed(prompt))
    whole, canvas = ids[:, :prompt], ids[:, prompt:]
    expected = decoder_logits(model, canvas, encoded(model, whole), prompt)
    parts = encoded(model, whole[:, : (prompt + 1) // 2])
    if prompt > 1:
        rest = whole[:, (prompt + 1) // 2 :]
        model.encode(rest, causal_span([(prompt + 1) // 2], rest.shape[1], "cpu"), parts)
    close(decoder_logits(model, canvas, parts, prompt), expected)


def test_window_hides_what_lies_before_it(model):
    """Only the full layers see a token more than a window before the canvas; the sliding layers alone do not."""
    ids = torch.randint(3, 250, (1, 40), generator=torch.Generator().manual_seed(0))
    cache = encoded(model, ids)
    span = canvas_span([40], [CANVAS], CANVAS, "cpu")
    visible = span.mask(12)
    assert visible is not None
    assert visible[0, 0, :, :29].sum() == 0
    assert bool(visible[0, 0, :, 29:].all())
    before = decoder_logits(model, ids[:, :CANVAS], cache, 40)
    for layer in (0, 2):
        cache.k[layer][:, :29] = 7.0
        cache.v[layer][:, :29] = 7.0
    assert torch.equal(decoder_logits(model, ids[:, :CANVAS], cache, 40), before)


def changed(golden, **changes):
    raw = copy.deepcopy(golden.raw)
    for key, value in changes.items():
        part = raw if key in ("tie_word_embeddings", "canvas_length", "text_config") else raw["text_config"]
        part[key] = value
    return DiffusionGemmaConfig.from_json(raw)


def test_both_ways_of_describing_full_layers_mean_the_same(diffusion_gemma_golden):
    listed = changed(diffusion_gemma_golden)
    by_keys = changed(diffusion_gemma_golden, per_layer_config=None, global_head_dim=32, num_global_key_value_heads=1)
    assert by_keys == listed
    assert changed(diffusion_gemma_golden, layer_types=None, num_hidden_layers=6).attention[5].window is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"text_config": None}, "text_config"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"top_k_experts": 9}, "top_k_experts"),
        ({"canvas_length": 0}, "canvas_length"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters.full_attention.rope_type"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(diffusion_gemma_golden, change, named):
    with pytest.raises(ModelConfigError, match=named):
        changed(diffusion_gemma_golden, **change)

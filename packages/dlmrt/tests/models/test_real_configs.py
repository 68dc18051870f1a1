"""The published configurations on the meta device: tensor names and shapes, and one forward of each."""

import json
import re
from pathlib import Path

import pytest
import torch

from dlmrt.cache import block_causal_span, canvas_span, causal_span
from dlmrt.models import MODELS

CONFIGS = Path(__file__).parents[1] / "configs"
ALL = sorted(path.stem for path in CONFIGS.glob("*.json"))


def raw_config(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def parsed(name: str):
    raw = raw_config(name)
    return MODELS[raw["model_type"]].config_class.from_json(raw)


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ALL)
def test_a_context_and_a_canvas_go_through_the_whole_model(name):
    config = parsed(name)
    model_class = MODELS[raw_config(name)["model_type"]]
    tensors = {n: torch.empty(s, device="meta", dtype=torch.bfloat16) for n, s in config.tensor_shapes().items()}
    model = model_class.from_tensors(config, tensors)
    spec, context = config.spec, 2 * config.spec.canvas_length
    cache = model.new_cache(1, context + spec.canvas_length)
    if spec.commit == "causal":
        span = causal_span([0], context, "meta")
    else:
        span = block_causal_span([0], context, spec.canvas_length, "meta")
    model.encode(torch.zeros(1, context, dtype=torch.int64, device="meta"), span, cache)
    ids = torch.zeros(1, spec.canvas_length, dtype=torch.int64, device="meta")
    z = torch.empty(*ids.shape, spec.hidden_size, dtype=torch.bfloat16, device="meta")
    canvas = canvas_span([context], [spec.canvas_length], spec.canvas_length, "meta")
    hidden = model.denoise(ids, z, ids == 0, canvas, cache)
    assert hidden.shape == z.shape
    assert model.logits(hidden).shape == (*ids.shape, spec.vocab_size)
    assert cache.nbytes == spec.kv_bytes(cache.capacity, torch.bfloat16)


def test_qwen3_tensors_are_those_of_transformers():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        reference = shapes_of(Qwen3ForCausalLM(Qwen3Config(**raw_config("qwen3_4b"))))
    assert reference.pop("lm_head.weight") == reference["model.embed_tokens.weight"]  # tied
    assert parsed("qwen3_4b").tensor_shapes() == reference


def test_sdar_tensors_are_those_of_an_untied_qwen3():
    body = parsed("qwen3_4b").tensor_shapes()
    assert parsed("sdar_4b").tensor_shapes() == body | {"lm_head.weight": body["model.embed_tokens.weight"]}


def test_diffusion_gemma_tensors_are_those_of_transformers():
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    with torch.device("meta"):
        reference = shapes_of(
            DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**raw_config("diffusion_gemma_26b_a4b")))
        )
    config = parsed("diffusion_gemma_26b_a4b")
    wanted = config.tensor_shapes()
    assert wanted == {name: shape for name, shape in reference.items() if name in wanted}
    assert all(config.ignores(name) for name in reference.keys() - wanted.keys())


@pytest.mark.parametrize("name", ["llada2_1_mini", "llada2_flash"])
def test_llada2_tensors_follow_the_name_patterns_of_the_reference_checkpoint(llada2_golden, name):
    def patterns(names):
        return {re.sub(r"\d+", "#", tensor) for tensor in names}

    raw, wanted = raw_config(name), parsed(name).tensor_shapes()
    assert patterns(wanted) == patterns(llada2_golden.tensors)
    experts = {int(found[1]) for tensor in wanted if (found := re.search(r"layers\.1\.mlp\.experts\.(\d+)\.", tensor))}
    assert experts == set(range(raw["num_experts"]))
    d, m = raw["hidden_size"], raw["moe_intermediate_size"]
    rows = (raw["num_attention_heads"] + 2 * raw["num_key_value_heads"]) * raw["head_dim"]
    assert wanted["model.layers.0.attention.query_key_value.weight"] == (rows, d)
    assert wanted["model.layers.0.mlp.gate_proj.weight"] == (raw["intermediate_size"], d)
    assert wanted["model.layers.1.mlp.experts.255.down_proj.weight"] == (d, m)
    assert wanted["model.layers.1.mlp.gate.expert_bias"] == (256,)

"""NVFP4 variants of every family compute exactly what a checkpoint of the expanded weights computes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlmrt import Engine, GenerationParams
from dlmrt.cache import block_causal_span, canvas_span, causal_span
from dlmrt.checkpoint.folder import read_folder
from dlmrt.checkpoint.weights import load_tensors
from dlmrt.quantize import quantize_folder
from orl_core.nvfp4 import from_checkpoint

FAMILIES = ["qwen_dlm", "llada2", "diffusion_gemma"]
MASK = 319
MARKS = {"compressed-tensors": ".weight_packed", "modelopt": ".weight_scale"}


@pytest.fixture(scope="module")
def source(checkpoint, llada2_golden, diffusion_gemma_golden, tmp_path_factory) -> Callable[[str], Path]:
    """The unquantised checkpoint of a family."""

    def find(family: str) -> Path:
        if family == "qwen_dlm":
            return checkpoint
        golden = llada2_golden if family == "llada2" else diffusion_gemma_golden
        folder = tmp_path_factory.mktemp(family)
        own = {"mask_token_id": MASK, "canvas_length": 8} if family == "llada2" else {}
        (folder / "config.json").write_text(json.dumps(golden.raw | own))
        shutil.copyfile(golden.folder / "model.safetensors", folder / "model.safetensors")
        return folder

    return find


def expand(quantised: Path, original: Path, target: Path) -> Path:
    """The checkpoint of the weights that `quantised` stands for, written without the loader under test."""
    stored, kept = load_file(quantised / "model.safetensors"), load_file(original / "model.safetensors")
    dialect = "modelopt" if (quantised / "hf_quant_config.json").is_file() else "compressed-tensors"
    expanded = {
        name.removesuffix(MARKS[dialect]): from_checkpoint(name.removesuffix(MARKS[dialect]), stored).dequantize()
        for name in stored
        if name.endswith(MARKS[dialect])
    }
    tensors = {}
    for name, tensor in kept.items():
        base = name.removesuffix(".weight")
        prefix, _, part = name.rpartition(".")
        if base in expanded:
            tensors[name] = expanded.pop(base)
        elif part == "gate_up_proj":
            pairs = [[expanded.pop(f"{prefix}.{i}.{half}_proj") for half in ("gate", "up")] for i in range(len(tensor))]
            tensors[name] = torch.stack([torch.cat(pair) for pair in pairs])
        elif part == "down_proj":
            tensors[name] = torch.stack([expanded.pop(f"{prefix}.{i}.down_proj") for i in range(len(tensor))])
        else:
            tensors[name] = tensor
    assert not expanded
    assert all(tensor.shape == kept[name].shape for name, tensor in tensors.items())
    target.mkdir()
    shutil.copyfile(original / "config.json", target / "config.json")
    save_file(tensors, target / "model.safetensors")
    return target


def run(folder: Path) -> tuple[torch.Tensor, list[int]]:
    """Logits of a canvas after a prompt, and an answer."""
    settings = read_folder(folder)
    tensors = load_tensors(folder, settings.config, "cpu", torch.float32, settings.quantization)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # aligned alike: products differ otherwise
    model = settings.model_class.from_tensors(settings.config, tensors)
    spec, context = model.spec, 2 * settings.config.spec.canvas_length
    cache = model.new_cache(1, context + spec.canvas_length)
    ids = torch.randint(3, 250, (1, context + spec.canvas_length), generator=torch.Generator().manual_seed(0))
    if spec.commit == "causal":
        span = causal_span([0], context, "cpu")
    else:
        span = block_causal_span([0], context, spec.canvas_length, "cpu")
    model.encode(ids[:, :context], span, cache)
    canvas = canvas_span([context], [spec.canvas_length], spec.canvas_length, "cpu")
    logits = model.logits(model.denoise(ids[:, context:], None, None, canvas, cache))
    engine = Engine(model, None, settings.defaults, name="test")
    params = GenerationParams(max_new_tokens=spec.canvas_length, max_steps=4 if spec.family == "uniform" else None)
    return logits, engine.generate(ids=ids[0, :9].tolist(), params=params).token_ids


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_checkpoint_computes_what_its_expanded_weights_compute(source, tmp_path, family, dialect):
    original = source(family)
    quantize_folder(original, tmp_path / "nvfp4", dialect)
    logits, tokens = run(tmp_path / "nvfp4")
    expected, expected_tokens = run(expand(tmp_path / "nvfp4", original, tmp_path / "expanded"))
    assert torch.equal(logits, expected)
    assert tokens == expected_tokens
    assert not torch.equal(logits, run(original)[0])


def test_converted_checkpoint_runs_as_it_is_and_in_nvfp4(write_checkpoint, tmp_path):
    pytest.importorskip("orl_train")
    from orl_train.convert import ConvertConfig, convert

    plain = write_checkpoint(
        tmp_path / "qwen3", model_type="qwen3", architectures=["Qwen3ForCausalLM"], residual_intermediate_size=0
    )
    raw = json.loads((plain / "config.json").read_text())
    own = {"canvas_length", "state_family", "mask_token_id", "residual_intermediate_size"}
    (plain / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if key not in own}))
    (plain / "generation_config.json").write_text(json.dumps({"eos_token_id": raw["vocab_size"] - 1}))
    converted = convert(str(plain), tmp_path / "converted", ConvertConfig(canvas_length=8))
    params = GenerationParams(max_new_tokens=16)
    # A fresh adapter adds nothing, so that the body alone decides.
    expected = Engine.from_pretrained(plain, device="cpu").model
    engine = Engine.from_pretrained(converted, device="cpu")
    ids = torch.arange(8)[None]
    span = canvas_span([0], [8], 8, "cpu")
    logits = [m.logits(m.denoise(ids, None, None, span, m.new_cache(1, 8))) for m in (expected, engine.model)]
    assert torch.equal(*logits)
    assert len(engine.generate("hello", params).token_ids) == 16
    quantize_folder(converted, tmp_path / "nvfp4")
    small = Engine.from_pretrained(tmp_path / "nvfp4", device="cpu")
    assert small.model.spec == engine.model.spec
    assert len(small.generate("hello", params).token_ids) == 16

"""Writing NVFP4 checkpoints."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dlmrt import Engine, GenerationParams
from dlmrt.checkpoint.weights import read_headers
from dlmrt.cli import app
from dlmrt.errors import CheckpointError, QuantizationError
from dlmrt.quantize import quantize_folder

NAME, INDEX = "model.safetensors", "model.safetensors.index.json"
LAYER = "model.layers.0."
PROJECTIONS = {f"self_attn.{n}_proj" for n in "qkvo"} | {f"mlp.{n}_proj" for n in ("gate", "up", "down")}


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_projections_are_packed_and_all_else_is_kept(checkpoint, tmp_path, dialect):
    report = quantize_folder(checkpoint, tmp_path / "out", dialect)
    source, stored = load_file(checkpoint / NAME), load_file(tmp_path / "out" / NAME)
    projections = {f"model.layers.{i}.{name}.weight" for i in range(2) for name in PROJECTIONS}
    for name in source.keys() - projections:
        assert torch.equal(stored.pop(name), source[name])
    parts = ("weight_packed", "weight_scale", "weight_global_scale")
    if dialect == "modelopt":
        parts = ("weight", "weight_scale", "weight_scale_2")
    assert stored.keys() == {f"{name.removesuffix('.weight')}.{part}" for name in projections for part in parts}
    assert report.bytes_after == sum(entry.nbytes for entry in read_headers(tmp_path / "out").values())
    assert report.bytes_after < report.bytes_before == sum(tensor.nbytes for tensor in source.values())
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (checkpoint / file).read_bytes()
    assert Engine.from_pretrained(tmp_path / "out", device="cpu").generate("a", GenerationParams()).token_ids
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_matrices_that_are_multiplied_as_one_share_a_global_scale(checkpoint, tmp_path):
    quantize_folder(checkpoint, tmp_path / "out")
    source, stored = load_file(checkpoint / NAME), load_file(tmp_path / "out" / NAME)
    for group in (["self_attn.q", "self_attn.k", "self_attn.v"], ["mlp.gate", "mlp.up"], ["mlp.down"], ["self_attn.o"]):
        amax = max(source[f"{LAYER}{name}_proj.weight"].abs().max() for name in group)
        for name in group:
            assert stored[f"{LAYER}{name}_proj.weight_global_scale"] == 2688 / amax


def test_report_holds_the_error_of_each_layer(checkpoint, tmp_path):
    from orl_core.nvfp4 import from_checkpoint

    report = quantize_folder(checkpoint, tmp_path / "out", "modelopt")
    source, stored = load_file(checkpoint / NAME), load_file(tmp_path / "out" / NAME)
    assert [layer.layer for layer in report.layers] == [0, 1]
    errors, norms = {}, {}
    for name in PROJECTIONS:
        weight = source[f"{LAYER}{name}.weight"].double()
        errors[name] = (from_checkpoint(LAYER + name, stored).dequantize() - weight).norm()
        norms[name] = weight.norm()
    first = report.layers[0]
    total = torch.stack(list(errors.values())).norm() / torch.stack(list(norms.values())).norm()
    assert first.relative_error == pytest.approx(total.item())
    assert 0.05 < first.relative_error < 0.15  # of normally distributed weights
    worst = max(PROJECTIONS, key=lambda name: errors[name] / norms[name])
    assert (first.worst, first.matrices) == (LAYER + worst, 7)
    assert first.worst_error == pytest.approx((errors[worst] / norms[worst]).item())


def test_sharded_source_gives_the_same_shards_with_an_index(checkpoint, tmp_path):
    tensors = load_file(checkpoint / NAME)
    folder = shutil.copytree(checkpoint, tmp_path / "source", ignore=shutil.ignore_patterns(NAME))
    names = sorted(tensors)  # q, k and v lie in different files
    parts = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    seen = []
    quantize_folder(folder, tmp_path / "sharded", progress=lambda *counts: seen.append(counts))
    quantize_folder(checkpoint, tmp_path / "single")
    assert seen == [(i + 1, len(names)) for i in range(len(names))]
    index = json.loads((tmp_path / "sharded" / INDEX).read_text())
    single = load_file(tmp_path / "single" / NAME)
    assert index["weight_map"].keys() == single.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in single.values())
    for file in parts:
        shard = load_file(tmp_path / "sharded" / file)
        assert shard.keys() == {name for name, place in index["weight_map"].items() if place == file}
        for name, tensor in shard.items():
            assert torch.equal(*(part.reshape(-1).view(torch.uint8) for part in (tensor, single[name])))


def test_compressed_tensors_reads_the_settings_and_decompresses_the_same_values(checkpoint, tmp_path):
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig

    from dlmrt.checkpoint.folder import read_folder
    from dlmrt.checkpoint.weights import load_tensors

    quantize_folder(checkpoint, tmp_path / "out")
    settings = read_folder(tmp_path / "out")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(raw)
    assert config.format == "nvfp4-pack-quantized"
    scheme = config.config_groups["group_0"]
    stored = load_file(tmp_path / "out" / NAME)
    loaded = load_tensors(tmp_path / "out", settings.config, "cpu", torch.bfloat16, settings.quantization)
    for name in sorted(PROJECTIONS):
        prefix = f"{LAYER}{name}."
        own = {key.removeprefix(prefix): tensor for key, tensor in stored.items() if key.startswith(prefix)}
        assert torch.equal(NVFP4PackedCompressor.decompress(own, scheme)["weight"], loaded[f"{prefix}weight"])
    # Whatever else is a linear module is on the ignore list.
    linear = {"lm_head", *(f"residual_adapter.{name}_proj" for name in ("gate", "up", "down"))}
    assert set(config.ignore) == linear


def test_what_cannot_be_quantised_is_refused_and_leaves_nothing(checkpoint, write_checkpoint, tmp_path):
    out = tmp_path / "results" / "out"
    with pytest.raises(QuantizationError, match="'gguf'"):
        quantize_folder(checkpoint, out, "gguf")
    ragged = write_checkpoint(tmp_path / "ragged", intermediate_size=40)
    with pytest.raises(QuantizationError, match=r"down_proj has 40 columns.*modelopt"):
        quantize_folder(ragged, out)
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    tensors = load_file(broken / NAME)
    tensors[f"{LAYER}mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, broken / NAME)
    with pytest.raises(QuantizationError, match=r"layers\.0\.mlp\.(gate|up)_proj cannot be quantised"):
        quantize_folder(broken, out)
    assert not list(tmp_path.glob("results/*"))
    quantize_folder(ragged, out, "modelopt")
    assert Engine.from_pretrained(out, device="cpu").generate("a", GenerationParams()).token_ids
    with pytest.raises(QuantizationError, match="quantised already"):
        quantize_folder(out, tmp_path / "twice")
    with pytest.raises(CheckpointError, match="exists"):
        quantize_folder(checkpoint, out)


def test_command_writes_the_folder_and_reports(checkpoint, tmp_path):
    def run(*arguments):
        return CliRunner().invoke(app, ["quantize", str(checkpoint), *map(str, arguments)])

    result = run("--out", tmp_path / "a", "--dialect", "modelopt", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    raw = json.loads(result.stdout)
    assert raw["dialect"] == "modelopt"
    assert [layer["layer"] for layer in raw["layers"]] == [0, 1]
    assert raw["layers"][0].keys() == {"layer", "matrices", "parameters", "relative_error", "worst", "worst_error"}
    people = run("--out", tmp_path / "b")
    assert people.exit_code == 0
    assert "mlp." in people.stdout or "self_attn." in people.stdout
    assert (tmp_path / "b" / "config.json").is_file()
    again = run("--out", tmp_path / "b")
    assert again.exit_code == 1
    assert again.stderr.startswith("error: ")


def test_transformers_loads_a_written_qwen3_checkpoint_to_the_same_weights(write_checkpoint, tmp_path):
    from transformers import Qwen3ForCausalLM

    from dlmrt.checkpoint.folder import read_folder
    from dlmrt.checkpoint.weights import load_tensors

    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "residual_intermediate_size": 0}
    quantize_folder(write_checkpoint(tmp_path / "source", **kind), tmp_path / "out")
    settings = read_folder(tmp_path / "out")
    ours = load_tensors(tmp_path / "out", settings.config, "cpu", torch.bfloat16, settings.quantization)
    model = Qwen3ForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    with torch.no_grad():
        model(torch.arange(8)[None])  # decompresses
    theirs = model.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())

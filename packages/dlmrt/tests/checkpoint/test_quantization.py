"""Reading NVFP4 checkpoints: both dialects, strictly, and nothing else."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlmrt.checkpoint.describe import describe
from dlmrt.checkpoint.folder import read_folder
from dlmrt.checkpoint.quantization import Quantization, parse_quantization
from dlmrt.checkpoint.weights import load_tensors
from dlmrt.errors import CheckpointError, QuantizationError
from dlmrt.quantize import quantize_folder

NAME = "model.safetensors"
UP = "model.layers.0.mlp.up_proj"
WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16, "symmetric": True}


@pytest.fixture(scope="module")
def quantised(checkpoint, tmp_path_factory):
    """An NVFP4 checkpoint of each dialect; not to be changed."""
    folder = tmp_path_factory.mktemp("nvfp4")
    for dialect in ("compressed-tensors", "modelopt"):
        quantize_folder(checkpoint, folder / dialect, dialect)
    return folder


@pytest.fixture(params=["compressed-tensors", "modelopt"])
def folder(request, quantised, tmp_path):
    return shutil.copytree(quantised / request.param, tmp_path / "model")


def load(folder, dtype=None):
    settings = read_folder(folder)
    return load_tensors(folder, settings.config, "cpu", dtype, settings.quantization)


def change(folder, edit):
    tensors = load_file(folder / NAME)
    edit(tensors)
    save_file(tensors, folder / NAME)


def settings_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def write_settings(folder, settings):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": settings}))


def test_weights_are_expanded_to_the_dtype_of_the_engine_or_of_the_other_tensors(folder):
    exact = load(folder)[f"{UP}.weight"]
    assert (exact.dtype, exact.shape) == (torch.float32, (48, 32))
    assert torch.equal(load(folder, torch.bfloat16)[f"{UP}.weight"], exact.bfloat16())
    change(folder, lambda t: t.update({n: x.half() for n, x in t.items() if x.dtype == torch.float32 and x.dim() > 1}))
    assert load(folder)[f"{UP}.weight"].dtype == torch.float16


def test_parts_of_a_matrix_may_lie_in_different_files(folder):
    expected, tensors = load(folder), load_file(folder / NAME)
    shards = {
        "a.safetensors": [n for n in tensors if "scale" in n],
        "b.safetensors": [n for n in tensors if "scale" not in n],
    }
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / NAME).unlink()
    loaded = load(folder)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def global_scale(folder):
    return f"{UP}.weight_scale_2" if (folder / "hf_quant_config.json").is_file() else f"{UP}.weight_global_scale"


def test_scales_that_are_missing_unexpected_or_misshapen_are_named(folder):
    name = global_scale(folder)
    stored = load_file(folder / NAME)
    for edit, message in (
        (lambda t: t.pop(name), rf"missing: {name}"),
        (lambda t: t.update({f"{UP}.weight_zero_point": torch.ones(1)}), rf"unexpected: {UP}\.weight_zero_point"),
        (lambda t: t.update({name: torch.ones(2)}), rf"wrong shape: {name} is \[2\] and must be"),
        (lambda t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"][:, :1].clone()}), r"is \[48, 1\]"),
        (lambda t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"].float()}), "is F32 and must be F8_E4M3"),
    ):
        save_file(stored, folder / NAME)
        change(folder, edit)
        with pytest.raises(CheckpointError, match=message):
            load(folder)


def test_a_projection_that_is_not_packed_is_missing_unless_the_settings_ignore_it(folder, checkpoint):
    original = load_file(checkpoint / NAME)[f"{UP}.weight"]

    def unpack(tensors):
        for name in [name for name in tensors if name.startswith(f"{UP}.")]:
            del tensors[name]
        tensors[f"{UP}.weight"] = original

    change(folder, unpack)
    with pytest.raises(CheckpointError, match=rf"missing: {UP}"):
        load(folder)
    settings = settings_of(folder)
    write_settings(folder, settings | {"ignore": [*settings["ignore"], UP]})
    assert torch.equal(load(folder)[f"{UP}.weight"], original)


def test_a_packed_matrix_that_the_settings_ignore_is_refused(folder):
    write_settings(folder, settings_of(folder) | {"ignore": [UP]})
    with pytest.raises(CheckpointError, match=rf"exclude it: {UP}"):
        load(folder)


def test_scales_of_activations_and_of_the_cache_are_not_read(folder):
    expected = load(folder)
    modelopt = (folder / "hf_quant_config.json").is_file()
    scale = f"{UP}.{'input_scale' if modelopt else 'input_global_scale'}"
    cache = "model.layers.0.self_attn.k_proj.k_scale"
    change(folder, lambda t: t.update({scale: torch.ones(1), cache: torch.ones(())}))
    assert load(folder).keys() == expected.keys()


def test_a_packed_head_is_read(folder):
    from orl_core.nvfp4 import quantize

    settings = settings_of(folder)
    head = load_file(folder / NAME)["lm_head.weight"]
    packed = quantize(head, settings["quant_method"])

    def pack(tensors):
        del tensors["lm_head.weight"]
        tensors.update(packed.to_checkpoint("lm_head"))

    change(folder, pack)
    write_settings(folder, settings | {"ignore": [name for name in settings["ignore"] if name != "lm_head"]})
    assert torch.equal(load(folder)["lm_head.weight"], packed.dequantize())


def test_modelopt_settings_may_stand_in_a_file_of_their_own(quantised, tmp_path):
    folder = shutil.copytree(quantised / "modelopt", tmp_path / "model")
    expected = load(folder)
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    assert load(folder).keys() == expected.keys()
    assert read_folder(folder).quantization == read_folder(quantised / "modelopt").quantization


def test_info_tells_dialect_stored_size_and_expanded_size(quantised, checkpoint):
    plain, small = describe(str(checkpoint)), describe(str(quantised / "modelopt"))
    assert (plain.quantization, small.quantization) == (None, "modelopt")
    assert small.weight_bytes == plain.weight_bytes == plain.stored_bytes
    assert small.stored_bytes < plain.stored_bytes
    assert small.parameters == plain.parameters
    assert any("nvfp4 (modelopt)" in value for _, value in small.lines())


def test_ignore_lists_are_read_in_the_syntax_of_their_dialect():
    ct = Quantization("compressed-tensors", ignore=("lm_head", r"re:.*self_attn\..*"))
    assert not ct.covers("lm_head")
    assert not ct.covers("model.layers.3.self_attn.q_proj")
    assert ct.covers("model.layers.3.mlp.up_proj")
    named = Quantization("compressed-tensors", targets=(r"re:.*mlp\.", "model.layers.0.self_attn.q_proj"))
    assert named.covers("model.layers.3.mlp.up_proj")
    assert named.covers("model.layers.0.self_attn.q_proj")
    assert not named.covers("model.layers.1.self_attn.q_proj")
    modelopt = Quantization("modelopt", ignore=("model.layers.1*", "router", "model.vision"))
    for name in ("model.layers.1.mlp.up_proj", "model.layers.0.router.proj", "model.vision.layers.0.fc"):
        assert not modelopt.covers(name)
    assert modelopt.covers("model.layers.0.mlp.up_proj")


def compressed(**changes):
    return (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
        | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS} | changes.pop("group", {})}}
        | changes
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "fp8"}, "quant_method = 'fp8'"),
        ({"quant_method": "awq", "bits": 4}, "quant_method = 'awq'"),
        ({"bits": 4}, "quant_method = None"),
        ("nvfp4", "'nvfp4'"),
        (compressed(format="float-quantized"), "'float-quantized'"),
        (compressed(format="mixed-precision", group={"format": "pack-quantized"}), "'pack-quantized'"),
        (compressed(group={"weights": WEIGHTS | {"num_bits": 8}}), "8 bits"),
        (compressed(group={"weights": None}), "config_groups.group_0"),
        (compressed(config_groups={}), "no config_groups"),
        (compressed(ignore="lm_head"), "ignore = 'lm_head'"),
        (compressed(ignore=["re:("]), "regular expression"),
        (compressed(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'FP8'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "groups of 32"),
        ({"quant_algo": "NVFP4_AWQ"}, "'NVFP4_AWQ'"),
    ],
)
def test_other_quantisations_are_refused_by_name(settings, named):
    with pytest.raises(QuantizationError) as caught:
        parse_quantization({"quantization_config": settings}, {})
    assert named in str(caught.value)


def test_modelopts_older_layouts_are_read():
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    expected = Quantization("modelopt", ignore=("lm_head",))
    assert parse_quantization({}, own) == parse_quantization({"quantization_config": own}, {}) == expected
    assert parse_quantization({}, {}) is None

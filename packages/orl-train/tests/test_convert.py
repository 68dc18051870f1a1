"""orl-train convert: a Qwen3 checkpoint becomes a QwenDLM that computes the same."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from orl_core.errors import ConfigError
from orl_train import convert as module
from orl_train import source as source_module
from orl_train.convert import ConvertConfig, convert
from orl_train.errors import CheckpointError
from orl_train.mask_token import choose_mask_token
from orl_train.models.qwen_dlm import QwenDLMForBlockDiffusion, causal_mask
from orl_train.saving import no_progress_bars

EOS, PAD, ROWS = 256, 257, 264  # rows 259.. of the embedding belong to no token
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def byte_tokenizer(*more) -> Tokenizer:
    """One token a byte, then <eos>, <pad>, <extra> and `more`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<pad>", "<extra>", *more])
    return tokenizer


def write_qwen3(folder, *, tied=False, more=(), max_shard_size="50GB", dtype=torch.float32, **overrides):
    settings = {"vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 96}
    settings |= {"tie_word_embeddings": tied, "eos_token_id": EOS, "rope_theta": 1e6}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**settings | overrides)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with no_progress_bars():
        model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    byte_tokenizer(*more).save(str(folder / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"added_tokens_decoder": {}}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    generation = {"eos_token_id": [EOS, PAD], "temperature": 0.6, "top_p": 0.95, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return write_qwen3(tmp_path_factory.mktemp("qwen3"))


def read(folder, file):
    return json.loads((folder / file).read_text())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_size", ["50GB", "20KB"])
def test_causal_logits_are_those_of_the_original(tmp_path, tied, max_shard_size):
    source = write_qwen3(tmp_path / "qwen3", tied=tied, max_shard_size=max_shard_size)
    assert (source / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")
    convert(str(source), tmp_path / "out")
    ids = torch.arange(3, 43)[None]
    positions, z = torch.arange(40)[None], torch.randn(1, 40, 32)
    receives = torch.ones(1, 40, dtype=torch.bool)
    with torch.no_grad(), no_progress_bars():
        expected = Qwen3ForCausalLM.from_pretrained(source)(ids).logits
        model, report = QwenDLMForBlockDiffusion.from_pretrained(tmp_path / "out", output_loading_info=True)
        logits = model.denoise(ids, positions, causal_mask(40))
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        assert torch.equal(model.denoise(ids, positions, causal_mask(40), z, receives), logits)
    assert not any(report.values()), report
    assert (model.lm_head.weight is model.embedding) is tied
    assert model.residual_adapter.alpha == 1
    assert model.residual_adapter.gate_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_configuration_tokenizer_and_template(qwen3, tmp_path):
    out = convert(str(qwen3), tmp_path / "out", ConvertConfig(canvas_length=16))
    raw = read(out, "config.json")
    assert (raw["model_type"], raw["architectures"]) == ("qwen_dlm", ["QwenDLMForBlockDiffusion"])
    assert (raw["canvas_length"], raw["state_family"], raw["mask_token_id"]) == (16, "uniform", None)
    assert raw["residual_intermediate_size"] == 64
    same = set(read(qwen3, "config.json")) - {"architectures", "model_type"}
    assert {key: raw[key] for key in same} == {key: read(qwen3, "config.json")[key] for key in same}
    assert read(out, "generation_config.json") == {
        "eos_token_id": [EOS, PAD],
        "pad_token_id": PAD,
        "max_new_tokens": 96,
        "decoder": {"name": "entropy_bound", "entropy_bound": 0.1},
    }
    assert (out / "tokenizer.json").read_bytes() == (qwen3 / "tokenizer.json").read_bytes()
    assert read(out, "tokenizer_config.json") == read(qwen3, "tokenizer_config.json")
    loaded = AutoTokenizer.from_pretrained(out)
    messages = [{"role": "user", "content": "Hi"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "<user>Hi"


def test_weights_keep_their_dtype_and_the_adapter_takes_it(tmp_path):
    source = write_qwen3(tmp_path / "qwen3", dtype=torch.bfloat16)
    out = convert(str(source), tmp_path / "out", ConvertConfig(residual_size=24))
    original = load_file(source / "model.safetensors")
    files = sorted(out.glob("model-*.safetensors"))
    tensors = load_file(files[0]) | load_file(files[1])
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in original.items())
    assert set(tensors) - set(original) == {
        f"residual_adapter.{name}"
        for name in ("norm.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight", "alpha")
    }
    assert tensors["residual_adapter.up_proj.weight"].shape == (24, 32)
    index = read(out, "model.safetensors.index.json")
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_without_adapter_a_single_file_stays_one(qwen3, tmp_path):
    out = convert(str(qwen3), tmp_path / "out", ConvertConfig(residual_size=0))
    assert (out / "model.safetensors").read_bytes() == (qwen3 / "model.safetensors").read_bytes()
    assert not (out / "model.safetensors.index.json").exists()
    assert read(out, "config.json")["residual_intermediate_size"] == 0


def test_the_same_source_gives_the_same_files(qwen3, tmp_path):
    first, second = (convert(str(qwen3), tmp_path / name) for name in ("first", "second"))
    assert sorted(p.name for p in first.iterdir()) == sorted(p.name for p in second.iterdir())
    assert all(path.read_bytes() == (second / path.name).read_bytes() for path in first.iterdir())


@pytest.mark.parametrize("family", ["uniform", "masked"])
@pytest.mark.parametrize("tied", [True, False])
def test_dlmrt_loads_the_result(tmp_path, family, tied):
    engine = pytest.importorskip("dlmrt.engine").Engine
    from dlmrt.params import GenerationParams

    source = write_qwen3(tmp_path / "qwen3", tied=tied)
    mask = "<extra>" if family == "masked" else None
    settings = ConvertConfig(canvas_length=8, family=family, mask_token=mask)
    convert(str(source), tmp_path / "out", settings)
    loaded = engine.from_pretrained(tmp_path / "out", device="cpu")
    spec = loaded.model.spec
    assert (spec.family, spec.canvas_length, spec.has_residual) == (family, 8, True)
    assert loaded.codec.render([{"role": "user", "content": "Hi"}]) == "<user>Hi"
    result = loaded.generate("Hi", GenerationParams(max_new_tokens=12, ignore_eos=True))
    assert len(result.token_ids) == 12


def masked(name=None):
    return ConvertConfig(family="masked", mask_token=name)


def test_an_existing_token_becomes_the_mask(qwen3, tmp_path):
    out = convert(str(qwen3), tmp_path / "out", masked("<extra>"))
    assert read(out, "config.json")["mask_token_id"] == 258
    assert read(out, "generation_config.json")["decoder"] == {"name": "threshold", "threshold": 0.95}
    assert (out / "tokenizer.json").read_bytes() == (qwen3 / "tokenizer.json").read_bytes()
    assert AutoTokenizer.from_pretrained(out).mask_token_id == 258


def test_the_usual_mask_is_found_by_itself(tmp_path):
    source = write_qwen3(tmp_path / "qwen3", more=["<|MASK|>"])
    assert read(convert(str(source), tmp_path / "out", masked()), "config.json")["mask_token_id"] == 259


def test_a_new_mask_takes_the_first_unused_row(qwen3, tmp_path):
    out = convert(str(qwen3), tmp_path / "out", masked("<new mask>"))
    assert read(out, "config.json")["mask_token_id"] == 259
    assert read(out, "config.json")["vocab_size"] == ROWS
    loaded = AutoTokenizer.from_pretrained(out)
    assert (loaded.mask_token, loaded.mask_token_id) == ("<new mask>", 259)
    assert loaded("a<new mask>b")["input_ids"][1] == 259
    assert Tokenizer.from_file(str(qwen3 / "tokenizer.json")).token_to_id("<new mask>") is None


def test_a_missing_mask_says_how_to_choose(qwen3, tmp_path):
    with pytest.raises(ConfigError) as error:
        convert(str(qwen3), tmp_path / "out", masked())
    for part in ("no '<|MASK|>'", "--mask-token", "<eos>, <pad>, <extra>", "row 259, the first of 5 unused rows"):
        assert part in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_vocabulary_is_never_resized():
    with pytest.raises(ConfigError, match="A new name is not possible: all 259 rows of the embedding are in use"):
        choose_mask_token(byte_tokenizer(), 259, "<new>")
    with pytest.raises(ConfigError, match="has id 258, beyond the 258 rows"):
        choose_mask_token(byte_tokenizer(), 258, "<extra>")


@pytest.mark.parametrize("name", ["<eos>", "<pad>"])
def test_a_token_that_ends_or_pads_answers_cannot_be_the_mask(qwen3, tmp_path, name):
    with pytest.raises(ConfigError, match=f"'{name}' ends or pads answers of this model"):
        convert(str(qwen3), tmp_path / "out", masked(name))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"canvas_length": 0}, "canvas_length is 0; it must be at least 1"),
        ({"family": "absorbing"}, "family is 'absorbing'; it must be 'uniform' or 'masked'"),
        ({"mask_token": "<extra>"}, "only the masked family has a mask token"),
        ({"residual_size": -1}, "residual_size is -1; it must be at least 0"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ConfigError, match=message):
        ConvertConfig(**settings)


@pytest.fixture
def copy(qwen3, tmp_path):
    """A copy of the checkpoint to spoil, with changed keys of its config.json."""

    def build(**changes):
        folder = tmp_path / "copy"
        shutil.copytree(qwen3, folder)
        (folder / "config.json").write_text(json.dumps(read(folder, "config.json") | changes))
        return folder

    return build


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama'; only dense Qwen3 checkpoints"),
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'; only dense"),
        ({"model_type": "qwen_dlm"}, "it is a QwenDLM model already"),
        ({"attention_bias": True}, "attention_bias = True in its config.json; only False converts"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = .*only None converts"),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "scales its rotary"),
        ({"vocab_size": None}, "vocab_size = None in its config.json; it must be an integer"),
    ],
)
def test_another_model_is_refused(copy, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        convert(str(copy(**changes)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_of_another_shape_are_named(copy, tmp_path):
    source = copy(intermediate_size=64, num_hidden_layers=3, layer_types=None)
    with pytest.raises(CheckpointError) as error:
        convert(str(source), tmp_path / "out")
    for part in ("model.layers.2.self_attn.q_proj.weight is missing", "do not fit its config.json", "more"):
        assert part in str(error.value)


def test_pickles_are_not_read(copy, tmp_path):
    source = copy()
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="only safetensors are read"):
        convert(str(source), tmp_path / "out")
    (source / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"only as pytorch_model.bin, a pickle, which may run code"):
        convert(str(source), tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", "has no config.json; a model is a folder in the Hugging Face layout"),
        ("tokenizer.json", "has no tokenizer.json; save its tokenizer in the fast format"),
    ],
)
def test_a_missing_file_is_named(copy, tmp_path, file, message):
    source = copy()
    (source / file).unlink()
    with pytest.raises(CheckpointError, match=message):
        convert(str(source), tmp_path / "out")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_truncated_file_is_named(copy, tmp_path, file):
    source = copy()
    content = (source / file).read_bytes()
    (source / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=file):
        convert(str(source), tmp_path / "out")


def test_a_source_that_does_not_exist_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"nobody/nothing has no config.json; .* while HF_HUB_OFFLINE is set"):
        convert("nobody/nothing", tmp_path / "out")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(CheckpointError, match="is neither a folder nor a checkpoint to be had from the hub"):
        convert(str(tmp_path / "nowhere"), tmp_path / "out")  # not the form of a hub id: nothing is asked


def test_a_hub_id_is_read_through_the_hub_cache(qwen3, tmp_path, monkeypatch):
    """Files that a hub repository lacks are left out; a connection that fails is not a missing file."""

    def cached_file(name, file, *, revision):
        assert (name, revision) == ("owner/name", "v1")
        if (qwen3 / file).is_file():
            return str(qwen3 / file)
        raise OSError(f"{name} does not appear to have a file named {file}")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(source_module, "cached_file", cached_file)
    out = convert("owner/name", tmp_path / "out", revision="v1")
    local = convert(str(qwen3), tmp_path / "local")
    assert all(path.read_bytes() == (local / path.name).read_bytes() for path in out.iterdir())

    def broken(name, file, *, revision):
        if file == "chat_template.jinja":
            raise OSError("We couldn't connect")
        return cached_file(name, file, revision=revision)

    monkeypatch.setattr(source_module, "cached_file", broken)
    with pytest.raises(CheckpointError, match=r"'owner/name' is neither .*couldn't connect"):
        convert("owner/name", tmp_path / "again", revision="v1")


def test_an_existing_model_is_replaced_only_by_force(qwen3, tmp_path):
    out = convert(str(qwen3), tmp_path / "out")
    with pytest.raises(ConfigError, match="exists; choose another folder, or give --force"):
        convert(str(qwen3), out, ConvertConfig(canvas_length=16))
    assert read(out, "config.json")["canvas_length"] == 256
    convert(str(qwen3), out, ConvertConfig(canvas_length=16), force=True)
    assert read(out, "config.json")["canvas_length"] == 16


def test_a_folder_that_is_no_model_is_never_replaced(qwen3, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is no model folder"):
        convert(str(qwen3), tmp_path, force=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_source_is_never_overwritten(qwen3):
    with pytest.raises(ConfigError, match="is the source"):
        convert(str(qwen3), qwen3, force=True)
    assert read(qwen3, "config.json")["model_type"] == "qwen3"


def test_a_full_disk_leaves_nothing(qwen3, tmp_path, monkeypatch):
    def full(path, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.shutil, "copyfile", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        convert(str(qwen3), tmp_path / "out")
    assert not list(tmp_path.iterdir())

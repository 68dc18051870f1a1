"""Strict loading: every defect is named before a tensor is read."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlmrt import Engine
from dlmrt.checkpoint.folder import read_folder
from dlmrt.checkpoint.weights import load_tensors, read_headers, weight_files
from dlmrt.errors import CheckpointError

NAME = "model.safetensors"


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "model")


def load(folder, dtype=None):
    return load_tensors(folder, read_folder(folder).config, "cpu", dtype)


def change(folder, edit):
    tensors = load_file(folder / NAME)
    edit(tensors)
    save_file(tensors, folder / NAME)


def test_single_file_is_loaded_as_it_is_or_converted(folder):
    stored = load_file(folder / NAME)
    for dtype in (None, torch.float64):
        loaded = load(folder, dtype)
        assert loaded.keys() == stored.keys()
        assert all(tensor.dtype == (dtype or torch.float32) for tensor in loaded.values())
        assert all(torch.equal(tensor, stored[name].to(tensor.dtype)) for name, tensor in loaded.items())


def shard(folder):
    tensors = load_file(folder / NAME)
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / NAME).unlink()
    return tensors


def test_sharded_checkpoint_equals_the_single_file(folder):
    tensors = shard(folder)
    loaded = load(folder)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert [file.name for file in weight_files(folder)] == ["a.safetensors", "b.safetensors"]


def test_missing_shard_and_damaged_index_are_named(folder):
    shard(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="index"):
        load(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing: model\.norm\.weight"),
        (lambda t: t.update(extra=torch.ones(2)), "unexpected: extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(31)}),
            r"model\.norm\.weight is \[31\] and must be \[32\]",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int32)}), "I32"),
        (lambda t: t.clear() or t.update(other=torch.ones(1)), "and 25 more"),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, edit, message):
    change(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_tied_checkpoint_may_hold_its_head_as_well(write_checkpoint, tmp_path):
    folder = write_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in load(folder)
    assert Engine.from_pretrained(folder, device="cpu").generate("a").token_ids


@pytest.mark.parametrize("kept", [0, 5, 8, 100, -1])
def test_truncated_file_is_named(folder, kept):
    content = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(content[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*(truncated|damaged)"):
        load(folder)


@pytest.mark.parametrize("content", [b"\x04" + b"\0" * 7 + b"[1,]", b"\x02" + b"\0" * 7 + b"[]", b"\xff" * 40])
def test_damaged_header_is_named(folder, content):
    (folder / NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "model.ckpt"])
def test_pickle_is_refused_by_name_and_never_opened(folder, name):
    (folder / NAME).rename(folder / name)
    with pytest.raises(CheckpointError, match=rf"{name}.*pickle"):
        load(folder)


def test_folder_without_weights_is_an_error(folder):
    (folder / NAME).unlink()
    with pytest.raises(CheckpointError, match="neither model"):
        load(folder)


def test_headers_tell_shapes_and_sizes_without_the_tensors(folder):
    entries = read_headers(folder)
    stored = load_file(folder / NAME)
    assert {name: entry.shape for name, entry in entries.items()} == {n: tuple(t.shape) for n, t in stored.items()}
    assert all(entry.nbytes == stored[name].nbytes and entry.dtype == "F32" for name, entry in entries.items())

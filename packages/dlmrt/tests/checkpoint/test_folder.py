import json
import shutil
from pathlib import Path

import pytest

from dlmrt import Engine
from dlmrt.checkpoint import embedded
from dlmrt.checkpoint.folder import parse_settings, read_folder
from dlmrt.checkpoint.hub import resolve
from dlmrt.decoding import DecoderSettings
from dlmrt.errors import CheckpointError, ModelConfigError, TokenizerError


def test_settings_of_both_files(checkpoint):
    settings = read_folder(checkpoint)
    assert settings.config.spec.canvas_length == 8
    assert settings.defaults.decoder == DecoderSettings("entropy_bound", {"max_steps": 6})
    assert settings.defaults.stop_ids == (256,)
    assert settings.defaults.max_new_tokens == 20


def test_generation_config_may_be_missing(tiny_config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(eos_token_id=[4, 5])))
    defaults = read_folder(tmp_path).defaults
    assert (defaults.stop_ids, defaults.max_new_tokens, defaults.decoder.name) == ((4, 5), None, "entropy_bound")


@pytest.mark.parametrize(
    ("config", "generation", "message"),
    [
        ({"model_type": "bert"}, {}, "bert"),
        ({"model_type": None}, {}, "model_type"),
        ({}, {"eos_token_id": 264}, "eos_token_id"),
        ({}, {"eos_token_id": "x"}, "eos_token_id"),
        ({}, {"max_new_tokens": 0}, "max_new_tokens"),
        ({}, {"decoder": {"name": "beam"}}, "beam"),
    ],
)
def test_settings_that_cannot_be_honoured_are_named(tiny_config, config, generation, message):
    with pytest.raises(ModelConfigError, match=message):
        parse_settings(tiny_config(**config), generation)


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_damaged_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_folder(tmp_path)


def test_folder_is_found_as_text_and_as_path(checkpoint, monkeypatch):
    assert resolve(checkpoint) == resolve(str(checkpoint)) == checkpoint
    monkeypatch.chdir(checkpoint.parent)
    assert resolve(checkpoint.name).samefile(checkpoint)


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where", "a/b/c", "", Path("no/where")])
def test_name_that_leads_nowhere_is_an_error(name):
    with pytest.raises(CheckpointError, match="is unknown"):
        resolve(name)


def test_folder_without_config_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve(tmp_path)


def test_unknown_embedded_model_names_those_that_exist():
    with pytest.raises(CheckpointError, match="embedded:nothing"):
        resolve("embedded:nothing")
    with pytest.raises(CheckpointError):
        resolve("embedded:../checkpoint")


def test_embedded_models_are_folders_of_the_assets(checkpoint, tmp_path, monkeypatch):
    shutil.copytree(checkpoint, tmp_path / "tiny")
    monkeypatch.setattr(embedded, "_ASSETS", tmp_path)
    assert embedded.embedded_models() == ["embedded:tiny"]
    assert resolve("embedded:tiny") == tmp_path / "tiny"


def test_hub_id_is_looked_up_offline_without_code_or_pickles(checkpoint, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    calls = []

    def snapshot_download(repo_id, *, revision, allow_patterns):
        calls.append((repo_id, revision))
        assert not any(pattern.endswith((".py", ".bin", ".pt")) for pattern in allow_patterns)
        if repo_id == "owner/absent":
            raise LocalEntryNotFoundError("not in the cache")
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert Engine.from_pretrained("owner/model", revision="v1", device="cpu").name == "owner/model"
    with pytest.raises(CheckpointError, match=r"owner/absent.*revision 'main'.*not in the cache"):
        resolve("owner/absent", "main")
    assert calls == [("owner/model", "v1"), ("owner/absent", "main")]


def test_missing_tokenizer_is_named(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Engine.from_pretrained(folder, device="cpu")

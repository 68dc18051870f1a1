"""The average of models is the mean of their weights in an ordinary folder."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from orl_core.errors import ConfigError
from orl_train.average import average
from orl_train.cli import app


def model(folder, value, **changes):
    folder.mkdir()
    tensors = {"a": torch.full((2, 3), value), "b": torch.arange(4.0) * value} | changes
    save_file({name: t.to(torch.bfloat16) for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"made": value}))
    (folder / "README.md").write_text("card")
    return str(folder)


def test_the_mean_keeps_dtype_and_files_of_the_first(tmp_path):
    sources = [model(tmp_path / str(value), value) for value in (1.0, 2.0, 6.0)]
    result = CliRunner().invoke(app, ["average", *sources, "--out", str(tmp_path / "out")])
    assert (result.exit_code, result.stdout) == (0, f"model: {tmp_path / 'out'}\n")
    mean = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(mean["a"], torch.full((2, 3), 3.0, dtype=torch.bfloat16))
    assert torch.equal(mean["b"], (torch.arange(4.0) * 3).to(torch.bfloat16))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"made": 1.0}


def test_what_cannot_be_averaged_is_refused_and_nothing_written(tmp_path):
    one, two = model(tmp_path / "one", 1.0), model(tmp_path / "two", 2.0)
    other = model(tmp_path / "other", 1.0, a=torch.zeros(3, 3))
    with pytest.raises(ConfigError, match="at least two"):
        average([one], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"other differ .* in name or shape"):
        average([one, other], tmp_path / "out")
    with pytest.raises(ConfigError, match="exists"):
        average([one, two], tmp_path / "one")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        average([one, str(tmp_path / "none")], tmp_path / "out")
    assert not (tmp_path / "out").exists()

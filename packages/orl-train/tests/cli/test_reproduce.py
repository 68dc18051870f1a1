"""orl-train reproduce: help, one-line errors, and that the shipped settings are valid."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from orl_train.cli import app
from orl_train.config import load_config
from orl_train.orl import OrlConfig
from orl_train.reproduce import load_study
from orl_train.reproduce.document import BEGIN, END

ROOT = Path(__file__).parents[4]


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_help_names_everything():
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, ["reproduce", "--help"])
    assert result.exit_code == 0
    assert all(word in result.output for word in ("--out", "--family", "--arm", "--docs", "--set", "--threads"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "masked.grid=[]"], "masked: grid is empty"),
        (["--set", "uniform.start=nowhere", "--family", "uniform"], "'nowhere' holds no model"),
        (["--arm", "everything"], "unknown arm 'everything'"),
        (["--family", "both"], "unknown family 'both'"),
    ],
)
def test_a_wrong_setting_is_one_line(tmp_path, words, message):
    result = invoke("reproduce", ROOT / "recipes" / "reproduce.toml", "--out", tmp_path / "out", *words)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


def test_the_shipped_settings_agree_with_one_another():
    config = load_study(ROOT / "recipes" / "reproduce.toml")
    uniform, masked = (load_config(OrlConfig, Path(family.recipe)) for family in (config.uniform, config.masked))
    assert uniform.rollout.prompts == masked.rollout.prompts
    assert uniform.keep >= config.candidates - 1
    assert len(config.headline_seeds) == 3


def test_the_document_has_the_marks():
    text = (ROOT / "docs" / "reproduction.md").read_text()
    assert text.index(BEGIN) < text.index(END)

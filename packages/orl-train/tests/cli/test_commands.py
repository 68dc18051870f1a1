"""The command line: help, one-line errors, exit codes, clean output."""

import json
import os
import signal

import pytest
from typer.testing import CliRunner

from orl_core.errors import ConfigError
from orl_train import __version__, pretrain
from orl_train.cli import app
from orl_train.cli.common import parse_overrides
from orl_train.cli.metrics import describe, metrics_reporter
from orl_train.metrics_log import metrics_log

RECIPE = """
steps = 2
batch_size = 2
micro_batch_size = 2
[model]
hidden_size = 32
layers = 1
heads = 2
kv_heads = 1
intermediate_size = 32
residual_intermediate_size = 16
canvas_length = 16
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--help"], ["pretrain", "convert"]),
        (["pretrain", "--help"], ["--out", "--set", "--threads"]),
        (["convert", "--help"], ["--canvas-length", "--family", "--mask-token", "--residual-size", "--force"]),
    ],
)
def test_help_names_everything(words, expected):
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, words)
    assert result.exit_code == 0
    assert all(word in result.output for word in expected)


def test_version():
    assert invoke("--version").output.strip() == __version__


def test_pretrain_prints_the_model_and_says_how_it_goes(quick_start, recipe, tmp_path):
    result = invoke("pretrain", recipe, "--out", tmp_path / "run", "--set", "steps=3", "--set", "save_every=2")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"model: {tmp_path / 'run' / 'model'}\n"
    assert [line[:11] for line in result.stderr.splitlines()] == ["update 1/3:", "update 2/3:", "update 3/3:"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {"loss", "gradient_norm", "lr", "residual", "seconds"} <= rows[0].keys()


def test_ctrl_c_saves_and_exits_with_130(quick_start, recipe, tmp_path, monkeypatch):
    original = pretrain.batch_loss

    def interrupted(*arguments, **settings):
        os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(pretrain, "batch_loss", interrupted)
        result = invoke("pretrain", recipe, "--out", tmp_path / "run")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "interrupted"
    assert (tmp_path / "run" / "checkpoints" / "step-00000001" / "run.json").is_file()
    assert invoke("pretrain", recipe, "--out", tmp_path / "run").exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "speed=3"], "unknown setting 'speed'; allowed are steps"),
        (["--set", "model.layers=few"], "layers is 'few'; it must be of type int"),
        (["--set", "steps"], "--set takes name=value, not 'steps'"),
    ],
)
def test_a_wrong_setting_is_one_line(recipe, tmp_path, words, message):
    result = invoke("pretrain", recipe, "--out", tmp_path / "run", *words)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_missing_recipe_is_one_line(tmp_path):
    result = invoke("pretrain", tmp_path / "nowhere.toml", "--out", tmp_path / "run")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "no configuration file" in result.stderr


def test_an_output_folder_that_cannot_be_made_is_one_line(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    result = invoke("pretrain", recipe, "--out", tmp_path / "file")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "is no folder" in result.stderr


def test_convert_reports_errors_in_one_line(tmp_path):
    for words in (["--family", "absorbing"], []):
        result = invoke("convert", tmp_path, "--out", tmp_path / "out", *words)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert result.stderr.startswith("error: ")


def test_overrides_are_toml_values_or_words():
    pairs = ["a=1", "b.c=0.5", "d=true", "e=masked", 'f="x=y"', "g=x=y"]
    assert parse_overrides(pairs) == {"a": 1, "b.c": 0.5, "d": True, "e": "masked", "f": "x=y", "g": "x=y"}
    with pytest.raises(ConfigError, match="--set takes name=value"):
        parse_overrides(["=1"])


def test_without_a_terminal_a_line_is_printed_now_and_then(tmp_path, capsys):
    for reporter, lines in (
        (metrics_reporter(tmp_path / "metrics.jsonl", 40), 20),
        (metrics_log(tmp_path / "metrics.jsonl"), 0),
    ):
        with reporter as report:
            for step in range(1, 41):
                report({"step": step, "loss": 0.5, "reward": 0.75})
        assert len(capsys.readouterr().err.splitlines()) == lines
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 40


def test_metrics_are_described_for_people():
    metrics = {"step": 1, "loss": 0.5, "loss_aec": 3e-5, "reward": 0.75, "tpf": 3.5, "entropy_step_0": 1.25}
    assert describe(metrics | {"dev_accuracy": 0.9, "seconds_rollout": 2.04}) == [
        "loss 0.5000, AEC 3e-05",
        "verified 75%, rollout TPF 3.50",
        "entropy, nats step 0: 1.25",
        "dev accuracy 90.0%",
        "rollout 2.0 s",
    ]
    assert describe({"step": 1, "loss": 0.5}) == ["loss 0.5000"]


def test_repeated_updates_replace_their_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def rows(steps, loss):
        with metrics_reporter(path, 9) as report:
            for step in steps:
                report({"step": step, "loss": loss})
        return [(row["step"], row["loss"]) for row in map(json.loads, path.read_text().splitlines())]

    assert rows([1, 2, 3], 0.5) == [(1, 0.5), (2, 0.5), (3, 0.5)]
    path.write_text(path.read_text() + '{"step": 4, "lo')  # killed while it wrote
    assert rows([2, 3], 0.25) == [(1, 0.5), (2, 0.25), (3, 0.25)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]

import json

import pytest
from typer.testing import CliRunner

from orl_eval import __version__, cli
from orl_eval.endpoints import LocalEngine


@pytest.fixture
def run(monkeypatch, fake, solutions):
    """Calls `orl-eval run` with a fake model; `run.loaded` lists what the command asked to load."""
    loaded = []

    def load(model, settings):
        loaded.append((model, settings))
        return fake(lambda _, prompt: solutions[prompt])

    monkeypatch.setattr(LocalEngine, "load", load)

    def call(*arguments):
        return CliRunner().invoke(cli.app, ["run", "--model", "m", *arguments])

    call.loaded = loaded
    return call


def test_json_is_one_object_with_the_documented_keys(run):
    result = run("--task", "arithmetic", "--limit", "5", "--json")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    report = json.loads(result.stdout)
    assert {"accuracy", "final_accuracy", "tpf", "tpf_commit", "tokens_per_second", "n"} <= report.keys()
    assert (report["accuracy"], report["n"], report["tpf"]) == (1.0, 5, 4.0)


def test_table_without_json(run):
    result = run("--limit", "5")
    assert result.exit_code == 0
    assert "every step verified" in result.stdout


def test_settings_reach_the_engine(run):
    run("--limit", "1", "--decoder-option", "entropy_bound=0.05", "--no-residual", "--max-new-tokens", "64")
    ((model, settings),) = run.loaded
    assert (model, settings.options, settings.residual, settings.max_new_tokens, settings.decoder) == (
        "m",
        {"entropy_bound": 0.05},
        False,
        64,
        None,
    )


def test_save_writes_the_answers(run, tmp_path):
    assert run("--limit", "2", "--json", "--save", str(tmp_path / "r.json")).exit_code == 0
    assert len(json.loads((tmp_path / "r.json").read_text())["answers"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "sums"), "unknown task 'sums'"),
        (("--limit", "0"), "limit is 0"),
        (("--split", "valid"), "split is 'valid'"),
        (("--decoder-option", "x"), "NAME=NUMBER"),
        (("--save", "/nowhere/r.json"), "no folder /nowhere"),
    ],
)
def test_bad_input_is_told_before_a_model_is_loaded(run, arguments, message):
    result = run(*arguments, "--json")
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not run.loaded


def test_interrupt_ends_cleanly_and_saves_nothing(run, monkeypatch, tmp_path):
    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "evaluate", interrupted)
    result = run("--json", "--save", str(tmp_path / "r.json"))
    assert result.exit_code == 130
    assert result.stdout == ""
    assert not list(tmp_path.iterdir())


def test_version():
    assert CliRunner().invoke(cli.app, ["--version"]).stdout == f"orl-eval {__version__}\n"

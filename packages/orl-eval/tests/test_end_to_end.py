import json

import pytest
from typer.testing import CliRunner

from dlmrt.checkpoint.embedded import embedded_models
from orl_eval.cli import app

MODEL = "embedded:base"
pytestmark = pytest.mark.skipif(MODEL not in embedded_models(), reason=f"this build of dlmrt ships no {MODEL}")


def run(*arguments):
    command = ["run", "--task", "arithmetic", "--model", MODEL, "--limit", "8", "--json", *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_the_embedded_model_answers_and_repeats_itself(tmp_path):
    first, second = (run("--save", str(tmp_path / name)) for name in ("first.json", "second.json"))
    assert first["n"] == 8
    assert first["accuracy"] >= 0.85
    assert first["final_accuracy"] >= first["accuracy"]
    assert first["tpf"] > first["tpf_commit"] > 0
    responses = [
        [answer["response"] for answer in json.loads((tmp_path / name).read_text())["answers"]]
        for name in ("first.json", "second.json")
    ]
    assert responses[0] == responses[1]
    assert first["forwards"] == second["forwards"]


def test_decoder_options_change_the_decoding():
    loose, strict = run("--decoder-option", "threshold=0.5"), run("--decoder-option", "threshold=0.99")
    assert (loose["settings"]["threshold"], strict["settings"]["threshold"]) == (0.5, 0.99)
    assert loose["tpf"] > strict["tpf"]

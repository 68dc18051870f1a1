"""The command line on a tiny checkpoint."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from dlmrt import __version__
from dlmrt.cli import app

MAIN = "from dlmrt.cli import main; main()"


@pytest.fixture
def run(checkpoint):
    """Runs a command with the tiny checkpoint as its model."""

    def invoke(command, *arguments, model=checkpoint, **options):
        place = [str(model)] if command == "info" else ["--model", str(model), "--device", "cpu"]
        return CliRunner().invoke(app, [command, *place, *map(str, arguments)], **options)

    return invoke


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"dlmrt {__version__}\n")


def test_generate_prints_the_answer_and_one_line_of_measures(run):
    result = run("generate", "hello", "--max-new-tokens", 9)
    assert result.exit_code == 0
    last = result.stdout.splitlines()[-1]
    assert re.fullmatch(r"9 tokens · .* tokens per forward · \d+ forwards · \d+ tokens/s · length", last)


def test_generate_json_is_one_object_with_the_promised_keys(run):
    result = run("generate", "hello", "--json", "--seed", 3, "--max-new-tokens", 9)
    assert result.exit_code == 0
    assert result.stderr == ""
    raw = json.loads(result.stdout)
    assert {"text", "token_ids", "finish_reason", "tpf", "tpf_commit", "forwards", "tokens_per_second"} <= raw.keys()
    assert len(raw["token_ids"]) == 9
    assert raw["seed"] == 3
    assert raw["finish_reason"] == "length"
    assert raw["timings"].keys() == {"imports", "load", "prefill", "decode"}
    assert all(seconds > 0 for seconds in raw["timings"].values())


def test_generate_options_reach_the_request(run, checkpoint):
    from dlmrt import Engine, GenerationParams

    engine = Engine.from_pretrained(checkpoint, device="cpu")
    flags = ["--entropy-bound", 3, "--max-steps", 4, "--temperature", 0.7, "--seed", 5, "--no-residual", "--ignore-eos"]
    params = GenerationParams(
        entropy_bound=3.0, max_steps=4, temperature=0.7, seed=5, residual=False, ignore_eos=True, max_new_tokens=20
    )
    raw = json.loads(run("generate", "hello", "--json", "--max-new-tokens", 20, *flags).stdout)
    expected = engine.generate("hello", params)
    assert raw["token_ids"] == expected.token_ids
    assert raw["blocks"] == expected.blocks
    stop = expected.text[2]
    assert json.loads(run("generate", "hello", "--json", *flags, "--stop", stop).stdout)["text"] == expected.text[:2]


def test_several_answers_are_those_of_their_seeds(run):
    flags = ["--max-new-tokens", 9, "--temperature", 0.9, "--top-k", 30, "--top-p", 0.95, "--repetition-stop", 2]
    raw = json.loads(run("generate", "hello", "--json", "--logprobs", "--n", 2, "--seed", 5, *flags).stdout)
    assert raw.keys() == {"answers"}
    for seed, answer in zip((5, 6), raw["answers"], strict=True):
        one = json.loads(run("generate", "hello", "--json", "--logprobs", "--seed", seed, *flags).stdout)
        for key in ("token_ids", "seed", "finish_reason", "text"):
            assert answer[key] == one[key]
        assert answer["logprobs"] == pytest.approx(one["logprobs"], abs=1e-3)
    people = run("generate", "hello", "--n", 2, "--seed", 5, *flags).stdout
    assert people.count("tokens per forward") == 2
    assert all(answer["text"] in people for answer in raw["answers"])


@pytest.mark.parametrize("flag", ["--stream", "--show-draft"])
def test_generate_streams_the_same_text(run, flag):
    plain, streamed = run("generate", "hello"), run("generate", "hello", flag)
    assert streamed.exit_code == 0
    assert streamed.stdout.splitlines()[:-1] == plain.stdout.splitlines()[:-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "--json"], "the prompt is empty"),
        (["a", "--decoder", "beam"], "beam"),
        (["a", "--entropy-bound", "-1"], "entropy_bound is -1"),
        (["a", "--threshold", "2"], "threshold"),
        (["a", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["a", "--max-new-tokens", "95"], "context"),
        (["a", "--driver", "warp"], "warp"),
        (["a", "--top-k", "5"], "top_k"),
        (["a", "--n", "2", "--stream"], "generate_all"),
        (["a", "--edit-blocks", "1"], "edit_blocks"),
    ],
)
def test_errors_are_one_line_on_standard_error(run, arguments, message):
    result = run("generate", *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "info", "bench", "chat"])
def test_unknown_model_is_an_error_of_every_command(run, command):
    result = run(command, *(["a"] if command == "generate" else []), model="nowhere")
    assert result.exit_code == 1
    assert "model 'nowhere' is unknown" in result.stderr


def test_info_describes_from_headers_alone(run, checkpoint):
    result = run("info", "--json", "--context", 50)
    assert result.exit_code == 0
    raw = json.loads(result.stdout)
    assert raw["model_type"] == "qwen_dlm"
    assert raw["family"] == "uniform"
    assert raw["canvas_length"] == 8
    assert raw["context"] == 50
    assert raw["weight_bytes"] == 4 * raw["parameters"]
    assert raw["weight_bytes"] < (checkpoint / "model.safetensors").stat().st_size < raw["weight_bytes"] + 10_000
    assert raw["kv_cache_bytes"] == 2 * 57 * 2 * 2 * 8 * 4
    assert raw["total_bytes"] == raw["weight_bytes"] + raw["kv_cache_bytes"] + raw["step_bytes"]
    assert raw["decoder"]["max_steps"] == 6
    people = run("info").stdout
    assert f"{raw['parameters']:,}" in people
    assert "entropy_bound" in people
    assert run("info", "--context", 97).exit_code == 1


def test_info_halves_the_weights_in_bfloat16(run):
    full, half = (json.loads(run("info", "--json", "--dtype", dtype).stdout) for dtype in ("auto", "bfloat16"))
    assert half["weight_bytes"] * 2 == full["weight_bytes"]
    assert half["kv_cache_bytes"] * 2 == full["kv_cache_bytes"]
    assert (full["dtype"], half["dtype"]) == ("float32", "bfloat16")


def test_bench_reports_what_it_measured(run):
    result = run("bench", "--json", "--prompts", 2, "--repeat", 2, "--threads", 1, "--max-new-tokens", 8)
    assert result.exit_code == 0
    raw = json.loads(result.stdout)
    assert (raw["requests"], raw["tokens"], raw["threads"]) == (4, 32, 1)
    assert raw["tpf"] > raw["tpf_commit"] > 0
    assert raw["tokens_per_second"] / raw["forwards_per_second"] == pytest.approx(raw["tpf"])
    assert 0 < raw["latency_p50"] <= raw["latency_p95"]
    assert raw["peak_memory_bytes"] > 10**7
    assert {"dlmrt", "orl-core", "torch", "python"} <= raw["versions"].keys()
    assert "tokens/s" in run("bench", "--prompts", 1, "--repeat", 1, "--max-new-tokens", 4).stdout


def test_bench_of_an_embedded_model_asks_word_problems(checkpoint):
    from dlmrt import Engine, GenerationParams
    from dlmrt.benchmark import measure

    engine = Engine.from_pretrained(checkpoint, device="cpu")
    engine.name, engine.context = "embedded:tiny", 10**6  # its prompts are longer than this tiny model's context
    params = GenerationParams(max_new_tokens=1)
    asked = []
    engine.generate = lambda ids, params: asked.append(ids) or Engine.generate(engine, ids=[1], params=params)
    report = measure(engine, params, prompts=2, repeat=1)
    assert report.workload == "held-out arithmetic word problems"
    assert len(asked) == 3
    assert "?" in engine.codec.decode(asked[1])


def test_chat_answers_line_by_line_without_a_terminal(run):
    result = run("chat", "--max-new-tokens", 8, input="hello\n/new\n\nagain\n/quit\nunread\n")
    assert result.exit_code == 0
    assert result.stdout.count("8 tokens · ") == 2


def test_chat_ends_at_the_end_of_its_input_and_survives_a_refused_line(run):
    result = run("chat", "--max-new-tokens", 8, input="x" * 200 + "\nhello\n")
    assert result.exit_code == 0
    assert "error: the prompt has 201 tokens" in result.stdout.replace("\n", " ")
    assert result.stdout.count("8 tokens · ") == 1


def test_canvas_settles_on_a_terminal(tiny_engine):
    from io import StringIO

    from rich.console import Console

    from dlmrt import GenerationParams
    from dlmrt.cli.canvas import draft_text, show_stream
    from dlmrt.result import Draft

    text = draft_text("done ", Draft(1, 2, [1, 2], [False, True], [("b", False), ("░", True)]))
    assert text.plain == "done b░"
    assert [span.style for span in text.spans if span.start == 6] == ["dim"]

    engine = tiny_engine(state_family="masked", mask_token_id=258)
    console = Console(file=StringIO(), force_terminal=True, width=40, height=10)
    events = engine.stream("hello", GenerationParams(max_new_tokens=40, threshold=0.9), drafts=True)
    result = show_stream(events, console)
    assert "░" in console.file.getvalue()
    assert result.token_ids == engine.generate("hello", GenerationParams(max_new_tokens=40, threshold=0.9)).token_ids


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def test_generate_imports_neither_transformers_nor_other_heavy_packages(checkpoint):
    code = (
        "import sys; from typer.testing import CliRunner; from dlmrt.cli import app\n"
        "assert 'torch' not in sys.modules, 'the command line itself imports torch'\n"
        f"result = CliRunner().invoke(app, ['generate', 'hello', '--model', {str(checkpoint)!r}, '--json'])\n"
        "assert result.exit_code == 0, result.output\n"
        "heavy = {'transformers', 'accelerate', 'fastapi', 'triton', 'huggingface_hub', 'pandas', 'rich.live'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False)
    assert out.stdout == "[]\n", out.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
def test_ctrl_c_ends_cleanly(write_checkpoint, tmp_path):
    folder = write_checkpoint(tmp_path / "long", max_position_embeddings=200_000)
    flags = ["--model", folder, "--max-new-tokens", "150000", "--ignore-eos", "--stream", "--entropy-bound", "9"]
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "generate", "hello", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    process.stdout.read(1)  # the first block has been printed
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=180)
    assert process.returncode == 130
    assert error == b"interrupted\n"

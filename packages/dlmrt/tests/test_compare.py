"""dlmrt bench --compare transformers, and models of random weights."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from dlmrt import GenerationParams
from dlmrt.benchmark import random_engine
from dlmrt.checkpoint.random_model import random_folder, write_random
from dlmrt.cli import app
from dlmrt.compare import compare
from dlmrt.errors import CheckpointError, ComparisonError

MODEL = "random:diffusion_gemma"
PARAMS = GenerationParams(max_new_tokens=100, max_steps=4)  # two canvases of 64


@pytest.fixture(scope="module")
def folder():
    with random_folder(MODEL) as path:
        yield path
    assert not path.exists()


@pytest.fixture
def engine(folder):
    return random_engine(MODEL, folder, device="cpu", dtype="float32", driver="auto")


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    # It marks steps for CUDA graphs, for which it would first import a compiler.
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)


def test_both_give_the_same_tokens_and_the_ratio_is_reported(engine, folder):
    driver = engine.driver
    report = compare(engine, folder, PARAMS, prompts=2, repeat=3)
    assert (report.requests, report.tokens, report.forwards) == (2, 256, 16)
    assert report.tpf == 16
    assert report.identical_tokens
    assert report.reference.startswith("transformers ")
    assert len(report.ratios) == 3
    assert sorted(report.ratios)[1] == report.ratio > 0
    assert min(report.tokens_per_second, report.reference_tokens_per_second) > 0
    assert engine.driver is driver
    assert "identical to transformers" in dict(report.lines())["tokens"]


def test_an_answer_that_ends_early_is_compared_up_to_its_end(engine, folder):
    free = compare(engine, folder, PARAMS, prompts=1, repeat=1)
    stops = tuple(range(3, 2048, 8))
    ended = compare(engine, folder, replace(PARAMS, stop_token_ids=stops), prompts=1, repeat=1)
    assert ended.tokens < free.tokens
    assert ended.forwards < free.forwards


def test_other_tokens_are_an_error(engine, folder):
    engine.model.softcap = 7.0
    with pytest.raises(ComparisonError, match="differ at token"):
        compare(engine, folder, PARAMS, prompts=1, repeat=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"temperature": 0.0}, "temperature 0"), ({"residual": False}, "conditions"), ({"top_k": 5}, "top_k")],
)
def test_what_transformers_cannot_do_is_refused(engine, folder, change, message):
    with pytest.raises(ComparisonError, match=message):
        compare(engine, folder, GenerationParams(max_new_tokens=64, **change), prompts=1, repeat=1)


def test_other_families_are_refused(tiny_engine, folder):
    with pytest.raises(ComparisonError, match="only diffusion_gemma"):
        compare(tiny_engine(), folder, GenerationParams(max_new_tokens=8), prompts=1, repeat=1)


def run(*arguments):
    return CliRunner().invoke(
        app, ["bench", "--device", "cpu", "--max-new-tokens", "64", "--max-steps", "2", *arguments]
    )


def test_command_compares():
    result = run("--model", MODEL, "--compare", "transformers", "--prompts", "1", "--repeat", "1", "--json")
    assert result.exit_code == 0, result.output
    raw = json.loads(result.stdout)
    assert raw["identical_tokens"] is True
    assert raw["ratio"] == raw["ratios"][0]
    assert raw["versions"].keys() >= {"dlmrt", "torch", "transformers"}


def test_random_models_can_be_measured_alone_and_are_always_the_same(tmp_path):
    result = run("--model", MODEL, "--prompts", "1", "--repeat", "1", "--threads", "1", "--json")
    assert json.loads(result.stdout)["tokens"] == 64
    for name in "ab":
        (tmp_path / name).mkdir()
        write_random("diffusion_gemma", tmp_path / name)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]
    with pytest.raises(CheckpointError, match="random:gpt2 is unknown"):
        write_random("gpt2", tmp_path)

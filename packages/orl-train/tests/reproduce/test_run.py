"""The whole comparison runs, continues where it was stopped, and shares its work between processes."""

import json
import shutil
from dataclasses import replace
from itertools import product

import pytest
from typer.testing import CliRunner

from orl_core.errors import ConfigError
from orl_train.cli import app
from orl_train.errors import TrainError
from orl_train.reproduce import load_study, reproduce
from orl_train.reproduce import run as run_module
from orl_train.reproduce import sweep as sweep_module
from orl_train.reproduce.arms import held
from orl_train.reproduce.document import BEGIN, END

ABLATIONS = ["no-aec", "no-kl", "no-residual", "off-policy", "rsft", "pretrain"]
JOBS = ["base", "orl-seed3", "orl-seed5", *(f"{name}-seed3" for name in ABLATIONS)]


@pytest.fixture(scope="module")
def whole(study, verdict, tmp_path_factory):
    """The uniform family's whole comparison: its folder, its report and what it said."""
    out, said = tmp_path_factory.mktemp("whole"), []
    report = reproduce(study, out, families=["uniform"], verifier=verdict, say=said.append, command="the command")
    return out, report, said


def calls(monkeypatch, module, name):
    """The arguments of every call of module.name from now on."""
    made, original = [], getattr(module, name)

    def counted(*arguments, **options):
        made.append(arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, counted)
    return made


def test_every_arm_is_trained_and_measured(whole):
    out, report, said = whole
    family = report["families"]["uniform"]
    assert list(family["arms"]) == JOBS
    for name, arm in family["arms"].items():
        assert arm["updates"] == (0 if name == "base" else 2)
        assert [p["threshold"] for p in arm["dev"]["as_trained"]] == [0.1, 4.0]
        assert all(p["n"] == 4 and p["residual"] == (name != "no-residual-seed3") for p in arm["dev"]["as_trained"])
        assert ("no_residual" in arm["dev"]) == (name in ("base", "orl-seed3"))
        assert None not in arm["after_choice"].values()
        assert arm["after_choice"]["chosen"]["n"] == 5
        assert (out / "uniform" / name / "model" / "config.json").is_file() == (name != "base")
    assert [row["seed"] for row in family["headline"]["seeds"]] == [3, 5]
    assert list(family["ablations"]) == [f"{name}" for name in ABLATIONS]
    assert any("min] uniform/orl-seed3: update 2/2" in line for line in said)
    assert report["command"] == "the command"
    assert json.loads((out / "report.json").read_text()) == json.loads(json.dumps(report))


def test_the_headline_is_the_ratio_of_what_dev_chose(whole):
    _, report, _ = whole
    family = report["families"]["uniform"]
    chosen = {name: arm["after_choice"]["chosen"] for name, arm in family["arms"].items()}
    for name, row in zip(["orl-seed3", "orl-seed5"], family["headline"]["seeds"], strict=True):
        assert row["ratio"] == pytest.approx(chosen[name]["tpf"] / chosen["base"]["tpf"])
    for name, arm in family["arms"].items():
        able = [p for p in arm["dev"]["as_trained"] if p["accuracy"] >= family["floor"] - 1e-9]
        assert arm["reached"] == bool(able)
        if able:
            assert arm["dev_chosen"]["tpf"] == max(p["tpf"] for p in able)
        assert chosen[name]["threshold"] == arm["dev_chosen"]["threshold"]
    same = family["arms"]["no-aec-seed3"]["after_choice"]["same"]
    assert same["threshold"] == chosen["orl-seed3"]["threshold"]


def test_arms_differ_from_one_another(whole):
    out, _, _ = whole
    keys = [json.loads((out / "uniform" / name / "arm.json").read_text())["key"] for name in JOBS[1:]]
    assert len(set(keys)) == len(keys)


def test_what_is_finished_is_not_run_again(whole, study, verdict, monkeypatch):
    out, report, _ = whole
    trained, graded = calls(monkeypatch, run_module, "train"), calls(monkeypatch, sweep_module, "grade")
    again = reproduce(study, out, verifier=verdict, families=["uniform"], say=lambda _: None, command="the command")
    assert (trained, graded) == ([], [])
    assert again == report


def test_a_larger_grid_measures_only_what_is_new(whole, study, verdict, monkeypatch, tmp_path):
    shutil.copytree(whole[0], tmp_path / "out")
    graded = calls(monkeypatch, sweep_module, "grade")
    wider = replace(study, uniform=replace(study.uniform, grid=(0.1, 1.0, 4.0)))
    report = reproduce(wider, tmp_path / "out", families=["uniform"], arms=["no-kl"], verifier=verdict, say=str)
    assert [p["threshold"] for p in report["families"]["uniform"]["arms"]["no-kl-seed3"]["dev"]["as_trained"]] == [
        0.1,
        1.0,
        4.0,
    ]
    assert len(graded) == 1  # the base's sweep at 1.0 is missing, so nothing is chosen yet


def test_the_uniform_family_is_measured_at_every_stop_rule(study, verdict, tmp_path):
    both = replace(study.uniform, grid=(0.1, 4.0), confidence_thresholds=(0.02, 9.0), stability_thresholds=(0, 1))
    out = tmp_path / "out"
    report = reproduce(
        replace(study, uniform=both), out, families=["uniform"], arms=["base"], verifier=verdict, say=str
    )
    points = report["families"]["uniform"]["arms"]["base"]["dev"]["as_trained"]
    at = {(p["threshold"], p["confidence_threshold"], p["stability_threshold"]): p["tpf"] for p in points}
    assert list(at) == list(product((0.1, 4.0), (0.02, 9.0), (0, 1)))
    # a mean entropy of 9 nats is never exceeded: a block may stop at its first step, or at the first unchanged one
    assert at[4.0, 9.0, 0] > at[4.0, 9.0, 1] >= at[4.0, 0.02, 1]
    assert "| 4, 9, 0 |" in (out / "report.md").read_text()


def test_interrupted_measurements_continue(study, verdict, monkeypatch, tmp_path):
    original, made = sweep_module.grade, []

    def interrupted(*arguments, **options):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(arguments)
        return original(*arguments, **options)

    only = {"families": ["masked"], "arms": ["base"], "verifier": verdict, "say": str}
    with monkeypatch.context() as patched:
        patched.setattr(sweep_module, "grade", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reproduce(study, tmp_path, **only)
    graded = calls(monkeypatch, sweep_module, "grade")
    report = reproduce(study, tmp_path, **only)
    base = report["families"]["masked"]["arms"]["base"]
    assert list(base["after_choice"]) == ["chosen", "no-residual", "best", "sampled"]
    assert None not in base["after_choice"].values()
    files = list((tmp_path / "masked" / "base" / "measurements").iterdir())
    assert len(graded) == len(files) - 3
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["masked"]


def test_an_arm_waits_for_the_base_and_is_completed_later(study, verdict, tmp_path):
    said = []
    only = {"families": ["masked"], "verifier": verdict}
    first = reproduce(study, tmp_path, arms=["rsft"], say=said.append, **only)["families"]["masked"]
    assert first["floor"] is None
    assert any("waits for" in line for line in said)
    assert "not measured yet" in (tmp_path / "report.md").read_text()
    reproduce(study, tmp_path, arms=["base", "orl"], say=str, **only)
    last = reproduce(study, tmp_path, arms=["rsft"], say=str, **only)["families"]["masked"]
    assert list(last["ablations"]) == ["rsft"]
    assert last["headline"]["mean"] == pytest.approx(sum(row["ratio"] for row in last["headline"]["seeds"]) / 2)


def test_a_second_stage_goes_on_from_the_first_and_is_the_headline(study, verdict, tmp_path):
    said, masked = [], replace(study.masked, second=study.masked.recipe)
    only = {"families": ["masked"], "verifier": verdict}
    reproduce(replace(study, masked=masked), tmp_path, arms=["orl-2"], say=said.append, **only)
    assert any("orl-2-seed3: waits for orl-seed3" in line for line in said)
    arms = ["base", "orl", "orl-2", "rsft"]
    family = reproduce(replace(study, masked=masked), tmp_path, arms=arms, say=str, **only)["families"]["masked"]
    for name, stage in (("headline", "orl-2"), ("first_stage", "orl")):
        chosen = [family["arms"][f"{stage}-seed{seed}"]["after_choice"]["chosen"]["tpf"] for seed in (3, 5)]
        base = family["arms"]["base"]["after_choice"]["chosen"]["tpf"]
        assert [row["ratio"] for row in family[name]["seeds"]] == pytest.approx([tpf / base for tpf in chosen])
    assert list(family["ablations"]) == ["rsft"]
    settings = json.loads((tmp_path / "masked" / "orl-2-seed3" / "arm.json").read_text())["settings"]
    assert settings["start"] == str(tmp_path / "masked" / "orl-seed3" / "model")
    assert settings["reference"] == masked.start
    assert settings["seed"] == 1003
    assert "### The first stage alone" in (tmp_path / "report.md").read_text()


def test_an_arm_that_another_process_holds_is_left_to_it(study, verdict, monkeypatch, tmp_path):
    said, graded = [], calls(monkeypatch, sweep_module, "grade")
    with held(tmp_path / "masked" / "base") as mine:
        assert mine
        reproduce(study, tmp_path, families=["masked"], arms=["base"], verifier=verdict, say=said.append)
    assert graded == []
    assert any("another process" in line for line in said)


def reject(prompt: str, response: str, reference: object) -> bool:
    return False


def test_a_collapsed_arm_is_measured_at_its_last_checkpoint(study, tmp_path):
    only = {"families": ["masked"], "arms": ["base", "orl"], "verifier": reject, "say": str}
    arm = reproduce(study, tmp_path, **only)["families"]["masked"]["arms"]["orl-seed3"]
    assert "2 updates in a row" in arm["stopped"]
    assert arm["dev_chosen"]["model"] == "checkpoints/step-00000001/model"
    assert "`orl-seed3` stopped early" in (tmp_path / "report.md").read_text()


def test_a_collapse_before_the_first_checkpoint_is_an_error(study, study_file, tmp_path):
    text = (study_file.parent / "recipe.toml").read_text().replace("max_barren = 2", "max_barren = 1")
    (tmp_path / "recipe.toml").write_text(text)
    strict = replace(study, masked=replace(study.masked, recipe=str(tmp_path / "recipe.toml")))
    with pytest.raises(TrainError, match="collapsed before its first checkpoint"):
        reproduce(strict, tmp_path / "out", families=["masked"], arms=["orl"], verifier=reject, say=str)


def test_dev_chooses_among_the_newest_models(whole, study, verdict, tmp_path):
    shutil.copytree(whole[0], tmp_path / "out")
    wider = replace(study, candidates=2)
    report = reproduce(wider, tmp_path / "out", families=["uniform"], arms=["base", "orl"], verifier=verdict, say=str)
    arm = report["families"]["uniform"]["arms"]["orl-seed5"]
    names = [p["model"] for p in arm["dev"]["as_trained"]]
    assert names == ["checkpoints/step-00000001/model"] * 2 + ["model"] * 2
    assert arm["after_choice"]["chosen"]["model"] == arm["dev_chosen"]["model"]


def test_wrong_input_is_refused_before_work(study, study_file, verdict, monkeypatch, tmp_path):
    trained = calls(monkeypatch, run_module, "train")

    def refused(config, message, **only):
        with pytest.raises(ConfigError, match=message):
            reproduce(config, tmp_path / "out", verifier=verdict, say=str, **only)

    refused(study, "unknown arm 'orll'; there are base, orl", arms=["orll"])
    refused(study, "unknown family 'mask'", families=["mask"])
    refused(replace(study, masked=replace(study.masked, start="nowhere")), r"'nowhere' holds no model")
    refused(replace(study, masked=replace(study.masked, start=study.uniform.start)), "state_family 'uniform'")
    refused(replace(study, masked=replace(study.masked, recipe="nowhere.toml")), "no configuration file")
    with pytest.raises(ConfigError, match="grid is empty"):
        load_study(study_file, {"masked.grid": []})
    with pytest.raises(ConfigError, match="must ascend"):
        load_study(study_file, {"uniform.grid": [2, 1]})
    with pytest.raises(ConfigError, match=r"must lie in \(0, 1\]"):
        load_study(study_file, {"masked.grid": [0.5, 1.5]})
    with pytest.raises(ConfigError, match=r"confidence_thresholds is .* must be greater than 0"):
        load_study(study_file, {"uniform.confidence_thresholds": [0, 1]})
    with pytest.raises(ConfigError, match=r"stability_thresholds is .* must be at least 0"):
        load_study(study_file, {"uniform.stability_thresholds": [-1, 1]})
    with pytest.raises(ConfigError, match="masked: stability_thresholds is set; only the uniform family"):
        load_study(study_file, {"masked.stability_thresholds": [0]})
    with pytest.raises(ConfigError, match=r"grid\[0\] is 'x'"):
        load_study(study_file, {"uniform.grid": ["x"]})
    with pytest.raises(ConfigError, match="one of headline_seeds"):
        load_study(study_file, {"ablation_seed": 9})
    assert trained == []


def test_results_of_other_settings_are_refused(whole, study, study_file, verdict, tmp_path):
    text = (study_file.parent / "recipe.toml").read_text().replace("prompts = 4", "prompts = 3")
    (tmp_path / "recipe.toml").write_text(text)
    other = replace(study, uniform=replace(study.uniform, recipe=str(tmp_path / "recipe.toml")))
    with pytest.raises(ConfigError, match="made with other settings"):
        reproduce(other, whole[0], families=["uniform"], verifier=verdict, say=str)


def test_the_tables_name_every_arm_and_every_published_sign(whole):
    text = (whole[0] / "report.md").read_text()
    assert all(f"`{name}`" in text for name in JOBS)
    for words in ("### Headline", "AEC raises TPF", "reverse KL accuracy falls", "residual TPF falls", "off-policy"):
        assert words in text
    widths = [
        {line.count(" | ") for line in block.split("\n")} for block in text.strip().split("\n\n") if block[0] == "|"
    ]
    assert len(widths) == 6
    assert all(len(width) == 1 for width in widths)


def test_the_command_prints_the_report_and_fills_the_document(study_file, tmp_path):
    document = tmp_path / "results.md"
    document.write_text(f"{BEGIN}\n{END}\n")
    words = ["reproduce", study_file, "--out", tmp_path / "out", "--family", "masked", "--arm", "base"]
    result = CliRunner().invoke(app, [str(word) for word in [*words, "--docs", document]])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"report: {tmp_path / 'out' / 'report.md'}\n"
    assert "masked/base: dev 2/2, start at 0.9: accuracy 0.0%" in result.stderr
    assert "## Masked family" in document.read_text()
    assert not list(tmp_path.rglob("*.tmp"))

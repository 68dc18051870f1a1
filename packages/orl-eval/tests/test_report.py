import io
import json

import pytest
from rich.console import Console

from orl_eval.errors import ReportError
from orl_eval.report import as_dict, as_table, check_destination, save
from orl_eval.runner import evaluate
from orl_eval.tasks import get_task


@pytest.fixture
def evaluation(fake, solutions):
    answerer = fake(lambda index, prompt: solutions[prompt] if index else "no idea")
    return evaluate(get_task("arithmetic"), answerer, limit=4)


def test_dict_is_json_and_flat(evaluation):
    report = json.loads(json.dumps(as_dict(evaluation)))
    assert report["accuracy"] == 0.75
    assert report["accuracy_interval"] == list(evaluation.summary.accuracy_interval)
    assert (report["n"], report["model"], report["task"], report["split"], report["seed"]) == (
        4,
        "fake",
        "arithmetic",
        "test",
        0,
    )
    assert report["settings"] == {"decoder": "fake"}
    assert "answers" not in report


def test_saved_report_holds_every_answer(evaluation, tmp_path):
    save(evaluation, tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [answer["correct"] for answer in report["answers"]] == [False, True, True, True]
    assert report["answers"][0]["response"] == "no idea"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_failed_save_leaves_the_old_report_and_nothing_else(evaluation, tmp_path, monkeypatch):
    target = tmp_path / "report.json"
    target.write_text("old")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(ReportError, match="No space left on device"):
        save(evaluation, target)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("report.json", "old")]


def test_impossible_destinations_are_refused(tmp_path):
    with pytest.raises(ReportError, match="is a folder"):
        check_destination(tmp_path)
    with pytest.raises(ReportError, match="create it first"):
        check_destination(tmp_path / "missing" / "report.json")


def test_table_shows_what_a_reader_needs(evaluation):
    text = io.StringIO()
    Console(file=text, width=120).print(as_table(evaluation))
    for shown in ("fake on arithmetic/test, 4 problems", "75.0%", "every step verified", "TPF", "4.00"):
        assert shown in text.getvalue()

"""A document takes the tables between its marks and keeps the rest."""

import pytest

from orl_core.errors import ConfigError
from orl_train.reproduce.document import BEGIN, END, update_document
from orl_train.reproduce.files import write_json

REPORT = {
    "command": "orl-train reproduce study.toml",
    "versions": {"torch": "2.11"},
    "machine": {"platform": "Linux", "cpus": 2},
    "settings": {"headline_seeds": [0, 1], "ablation_seed": 0, "dev_problems": 4, "test_problems": 5},
    "distinct_dev_problems": 4,
    "distinct_test_problems": 5,
    "families": {"masked": {"floor": None}},
}


def test_only_what_lies_between_the_marks_is_replaced(tmp_path):
    out, document = tmp_path / "out", tmp_path / "results.md"
    write_json(out / "report.json", REPORT)
    (out / "frontier.png").write_bytes(b"picture")
    document.write_text(f"# Title\n\n{BEGIN}\nearlier tables\n{END}\n\nEnd.\n")
    update_document(document, out)
    text = document.read_text()
    assert text.startswith(f"# Title\n\n{BEGIN}\n\n## How it was made")
    assert text.endswith(f"\n{END}\n\nEnd.\n")
    assert "earlier tables" not in text
    assert "](results-frontier.png)" in text
    assert (tmp_path / "results-frontier.png").read_bytes() == b"picture"
    assert (tmp_path / "results.json").read_text() == (out / "report.json").read_text()
    update_document(document, out)
    assert document.read_text() == text


def test_a_document_without_marks_is_refused(tmp_path):
    (tmp_path / "plain.md").write_text("# Title\n")
    for name in ("plain.md", "nowhere.md"):
        with pytest.raises(ConfigError, match="has no lines"):
            update_document(tmp_path / name, tmp_path)

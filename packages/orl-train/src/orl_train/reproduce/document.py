"""Puts a report's tables into a document, between two marks."""

import json
import shutil
from pathlib import Path

from orl_core.errors import ConfigError
from orl_train.reproduce.files import replacing
from orl_train.reproduce.markdown import markdown

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def update_document(document: Path, out: Path) -> None:
    """Replaces what lies between the marks of `document` by the report in `out`, and copies its JSON and the picture
    beside it.

    Raises ConfigError if the document is missing or lacks the marks.
    """
    text = document.read_text() if document.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"{document} has no lines {BEGIN!r} and {END!r}; put them where the tables shall stand")
    report = json.loads((out / "report.json").read_text())
    shutil.copyfile(out / "report.json", document.with_suffix(".json"))
    image = None
    if (out / "frontier.png").is_file():
        image = f"{document.stem}-frontier.png"
        shutil.copyfile(out / "frontier.png", document.with_name(image))
    with replacing(document) as temporary:
        temporary.write_text(f"{before}{BEGIN}\n\n{markdown(report, image)}\n{END}{after}")

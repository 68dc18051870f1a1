"""The README tells the truth: its example runs and its table lists every setting with its default."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from orl_train.lora import LoraSettings
from orl_train.orl import OrlConfig
from orl_train.pretrain import PretrainConfig

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert f"# {capsys.readouterr().out.strip()}\n" in example


@pytest.mark.parametrize(
    ("title", "config", "required"),
    [
        ("### Settings", PretrainConfig(steps=1), "steps"),
        ("### ORL settings", OrlConfig(start="x", lora=LoraSettings()), "start"),
    ],
)
def test_the_tables_list_every_setting_with_its_default(title, config, required):
    section = README.partition(title + "\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| `([a-z_.]+)` \| (\S+) \|", section, re.MULTILINE)
    listed = {name: None if default == "required" else json.loads(default) for name, default in rows}
    expected = {}
    for name, value in dataclasses.asdict(config).items():
        expected |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    optional = {"lora": None} if title == "### ORL settings" else {}
    assert listed == expected | {required: None} | optional

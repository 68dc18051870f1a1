"""The README tells the truth: its example runs and its table lists every setting with its default."""

import dataclasses
import json
import re
from pathlib import Path

from orl_train.pretrain import PretrainConfig

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert f"# {capsys.readouterr().out.strip()}\n" in example


def test_the_table_lists_every_setting_with_its_default():
    section = README.partition("### Settings")[2].partition("###")[0]
    rows = re.findall(r"^\| `([a-z_.]+)` \| (\S+) \|", section, re.MULTILINE)
    listed = {name: None if default == "required" else json.loads(default) for name, default in rows}
    expected = {}
    for name, value in dataclasses.asdict(PretrainConfig(steps=1)).items():
        expected |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    assert listed == expected | {"steps": None}

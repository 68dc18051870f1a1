"""The README tells the truth: its example runs and its table lists the modules that exist."""

import re
from pathlib import Path

import orl_core

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out.strip()
    assert f"# {printed}\n" in example


def test_the_table_lists_every_module():
    listed = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    package = Path(orl_core.__file__).parent
    present = [p.stem for p in package.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    assert sorted(listed) == sorted(name for name in present if name != "__init__")


def test_every_exported_name_exists():
    for name in orl_core.__all__:
        assert hasattr(orl_core, name), name

"""Commands in the documents exist, with those options and arguments; nothing long is run."""

import ast
import re
import shlex
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer.main

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    path.relative_to(ROOT)
    for pattern in ("*.md", "packages/*/README.md", "docs/**/*.md", "recipes/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
PROGRAMS = {script.name: script for script in entry_points(group="console_scripts") if script.dist}
OWN_PROGRAMS = {"dlmrt", "orl-train", "orl-eval", "orl-serve"}
RUNNERS = {"uv", "run", "uvx", "time", "--frozen", "$"}


def bash_blocks(text: str) -> list[str]:
    return re.findall(r"^ *```(?:bash|sh|console)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """Simple commands of all fenced shell blocks: comments, continuations, variables and runners taken off."""
    found = []
    for block in bash_blocks(text):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
            lexer.commenters, lexer.whitespace_split = "#", True
            command: list[str] = []
            for word in [*lexer, ";"]:
                if word and set(word) <= set("|&;"):
                    found.append(command)
                    command = []
                else:
                    command.append(word)
    return [stripped for command in found if (stripped := strip_runner(command))]


def strip_runner(command: list[str]) -> list[str]:
    """The program and its arguments; redirections end them."""
    words = list(command)
    while words and (words[0] in RUNNERS or re.match(r"[A-Z_]+=", words[0])):
        words.pop(0)
    for index, word in enumerate(words):
        if set(word) <= set("<>"):
            return words[:index]
    return words


def check_typer(words: list[str]) -> None:
    """Parses the arguments as the program would, up to the point where it would begin its work."""
    app = import_module(PROGRAMS[words[0]].module).app
    command, name, rest = typer.main.get_command(app), words[0], words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"{name} has no command {rest[0]!r}; it has {sorted(command.commands)}"
        command, name, rest = command.commands[rest[0]], f"{name} {rest[0]}", rest[1:]
    if rest not in (["--help"], ["--version"]):
        command.make_context(name, list(rest))


@pytest.fixture(scope="session")
def nox_sessions() -> set[str]:
    functions = [
        node for node in ast.parse((ROOT / "noxfile.py").read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    return {f.name for f in functions if any("nox.session" in ast.unparse(d) for d in f.decorator_list)}


def check_nox(words: list[str], sessions: set[str]) -> None:
    words = words[: words.index("--")] if "--" in words else words
    if "-s" in words:
        chosen = words[words.index("-s") + 1 :]
        assert chosen, "nox -s names no session"
        assert set(chosen) <= sessions, f"noxfile.py has no session {set(chosen) - sessions}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_commands_exist(document, nox_sessions):
    for words in commands((ROOT / document).read_text()):
        try:
            if words[0] in OWN_PROGRAMS:
                check_typer(words)
            elif words[0] == "nox":
                check_nox(words, nox_sessions)
        except Exception as error:
            pytest.fail(f"{document}: `{shlex.join(words)}`: {error}")


def test_ci_runs_the_tests_as_the_readme_says():
    readme = [shlex.join(words) for words in commands((ROOT / "README.md").read_text())]
    assert "nox -s tests" in readme
    assert "\nuvx nox -s tests\n" in (ROOT / ".ci" / "run").read_text()


def test_the_walk_over_blocks():
    block = "pip install uv && uv run dlmrt info \\\n  --json > out.json  # a comment\nA=1 uvx nox -s tests\n"
    expected = [["pip", "install", "uv"], ["dlmrt", "info", "--json"], ["nox", "-s", "tests"]]
    assert commands(f"```bash\n{block}```\n") == expected

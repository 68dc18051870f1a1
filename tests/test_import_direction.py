"""Imports between packages go one way, optional packages are reached inside functions, nothing is used undeclared."""

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import packages_distributions

import pytest

# who may import whom; nothing imports orl_train
ALLOWED = {
    "orl_core": set(),
    "dlmrt": {"orl_core"},
    "orl_train": {"orl_core", "dlmrt"},
    "orl_eval": {"orl_core", "dlmrt"},
    "orl_serve": {"orl_core", "dlmrt", "orl_eval"},
}

# comes with torch, but only where it can be used: modules that import it must be imported lazily by the others
COMES_WITH_TORCH = "triton"


@dataclass(frozen=True)
class Import:
    """One imported top-level module; `lazy` if it runs inside a function or is only for the type checker."""

    module: str
    line: int
    lazy: bool


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def imported_names(node: ast.AST) -> list[str]:
    """Dotted names that a statement or an import_module("...") call imports, relative imports left out."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module] if node.level == 0 and node.module else []
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}:
        return [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
    return []


def find_imports(source: str) -> list[Import]:
    found: list[Import] = []

    def walk(node: ast.AST, lazy: bool) -> None:
        found.extend(Import(name.split(".")[0], node.lineno, lazy) for name in imported_names(node))
        if is_type_checking(node):
            for child in node.body:
                walk(child, True)
            for child in node.orelse:
                walk(child, lazy)
            return
        inner = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            walk(child, inner)

    walk(ast.parse(source), False)
    return found


def all_imports(package):
    return [(path, found) for path in package.sources for found in find_imports(path.read_text())]


def imports_at_top(path, module: str) -> bool:
    return any(found.module == module and not found.lazy for found in find_imports(path.read_text()))


def distribution_name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement).group()).lower()


def declared(package) -> tuple[set[str], set[str]]:
    """Distributions that the package always has, and those of its extras."""
    project = package.manifest["project"]
    extras = project.get("optional-dependencies", {}).values()
    return (
        {distribution_name(requirement) for requirement in project.get("dependencies", [])},
        {distribution_name(requirement) for extra in extras for requirement in extra},
    )


def test_every_package_has_a_rule(packages):
    assert {package.module for package in packages.values()} == set(ALLOWED)


def test_imports_between_packages_go_one_way(packages):
    wrong = [
        f"{path}:{found.line} imports {found.module}"
        for package in packages.values()
        for path, found in all_imports(package)
        if found.module in ALLOWED and found.module not in ALLOWED[package.module] | {package.module}
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_are_declared_and_optional_ones_are_lazy(packages):
    providers = {module: {distribution_name(d) for d in found} for module, found in packages_distributions().items()}
    providers |= {package.module: {package.name} for package in packages.values()} | {COMES_WITH_TORCH: {"torch"}}
    wrong = []
    for package in packages.values():
        always, optional = declared(package)
        for path, found in all_imports(package):
            if found.module in sys.stdlib_module_names or found.module == package.module:
                continue
            names = providers.get(found.module, {found.module})
            where = f"{path}:{found.line} imports {found.module}"
            if not names & (always | optional):
                wrong.append(f"{where}, which {package.name} does not declare")
            elif not names & always and not found.lazy:
                wrong.append(f"{where} at module top, but it comes only with an extra of {package.name}")
    assert not wrong, "\n".join(wrong)


def test_packages_import_without_triton(packages):
    modules = [
        ".".join(path.relative_to(package.folder / "src").with_suffix("").parts).removesuffix(".__init__")
        for package in packages.values()
        for path in package.sources
        if path.stem != "__main__" and not imports_at_top(path, COMES_WITH_TORCH)
    ]
    lines = ["import importlib, sys", f"sys.modules[{COMES_WITH_TORCH!r}] = None"]
    lines += [f"importlib.import_module({module!r})" for module in modules]
    finished = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_declared_members_agree_with_the_direction(packages):
    members = {package.name: package.module for package in packages.values()}
    for package in packages.values():
        always, optional = declared(package)
        assert {members[name] for name in (always | optional) & members.keys()} <= ALLOWED[package.module]


@pytest.mark.parametrize(
    ("source", "module", "lazy"),
    [
        ("import torch.nn as nn", "torch", False),
        ("from dlmrt.engine import Engine", "dlmrt", False),
        ("def f():\n    from dlmrt import Engine", "dlmrt", True),
        ("class A:\n    import dlmrt", "dlmrt", False),
        ("try:\n    import dlmrt\nexcept ImportError:\n    pass", "dlmrt", False),
        ("if TYPE_CHECKING:\n    import dlmrt", "dlmrt", True),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import dlmrt", "dlmrt", False),
        ("import importlib\nx = importlib.import_module('orl_train.tasks')", "orl_train", False),
    ],
)
def test_the_walk_sees(source, module, lazy):
    assert (module, lazy) in {(found.module, found.lazy) for found in find_imports(source)}

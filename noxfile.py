"""The workspace's checks. `uvx nox` runs tests, lint and types; `uvx nox -l` lists all sessions."""

import os
import shutil
import tempfile
import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2026.4"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint", "types"]

ROOT = Path(__file__).parent
PACKAGES = ["orl-core", "dlmrt", "orl-train", "orl-eval", "orl-serve"]
# torch in two test processes on two cores: one thread each, or they wait for one another
TEST_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def sync(session: nox.Session, *options: str) -> None:
    """The locked environment, in the session's own virtual environment."""
    session.run_install(
        "uv", "sync", "--frozen", "--quiet", *options, env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location}
    )


@nox.session
def tests(session: nox.Session) -> None:
    """All tests of all packages; arguments after -- go to pytest in place of the default paths."""
    sync(session)
    session.run("pytest", "-n", "2", "--dist", "loadfile", *session.posargs, env=TEST_ENV)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and formatting."""
    sync(session, "--only-group", "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """pyright over the packages' sources."""
    sync(session)
    session.run("pyright")


def manifest(package: str) -> dict:
    """The [project] table of a package."""
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]


def locked_versions(session: nox.Session, target: Path) -> Path:
    """Third-party versions of uv.lock as constraints: they choose versions, they install nothing."""
    constraints = target / "constraints.txt"
    export = ["uv", "export", "--frozen", "--quiet", "--no-hashes", "--no-emit-workspace", "-o", str(constraints)]
    session.run_install(*export, silent=True)
    return constraints


@nox.session(venv_backend="none")
def wheels(session: nox.Session) -> None:
    """Each wheel alone in a fresh environment outside the workspace: import, --help, smoke test.

    Catches what the shared environment hides: undeclared imports, files missing from a wheel, workspace-only sources.
    """
    with tempfile.TemporaryDirectory(prefix="wheels-") as name:
        outside = Path(name)
        dist = outside / "dist"
        session.run("uv", "build", "--quiet", "--all-packages", "--no-sources", "-o", str(dist))
        constraints = locked_versions(session, outside)
        with session.chdir(outside):
            for package in session.posargs or PACKAGES:
                check_wheel(session, package, outside, constraints)


def check_wheel(session: nox.Session, package: str, outside: Path, constraints: Path) -> None:
    project, module = manifest(package), package.replace("-", "_")
    wheel = next((outside / "dist").glob(f"{module}-{project['version']}-*.whl"))
    environment = outside / package
    python = environment / "bin" / "python"
    session.log(f"{wheel.name} alone")
    session.run("uv", "venv", "--quiet", str(environment))
    install = ["uv", "pip", "install", "--quiet", "--python", str(python), "--find-links", str(outside / "dist")]
    session.run(*install, "-c", str(constraints), str(wheel))
    session.run(str(python), "-I", "-c", f"import {module}; print('{package}', {module}.__version__)")
    for script in project.get("scripts", {}):
        session.run(str(environment / "bin" / script), "--help", silent=True)
    # copied, so that nothing of the checkout is near it
    smoke = shutil.copy(ROOT / "tests" / "smoke" / f"{module}.py", outside)
    session.run(
        str(python), "-I", smoke, env=TEST_ENV | {"PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    )
    shutil.rmtree(environment)


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """The oldest Python with the lowest versions that the packages declare: orl-core's tests, all smoke tests."""
    manifests = [option for package in PACKAGES for option in ("-r", f"packages/{package}/pyproject.toml")]
    members = [option for package in PACKAGES for option in ("-e", f"packages/{package}")]
    install = ["uv", "pip", "install", "--quiet"]
    session.run_install(*install, "--resolution", "lowest-direct", *manifests)
    session.run_install(*install, "--no-deps", *members)
    session.run_install(*install, "--group", "test")
    session.run("pytest", "packages/orl-core/tests", *session.posargs, env=TEST_ENV)
    for package in PACKAGES:
        session.run("python", "-I", f"tests/smoke/{package.replace('-', '_')}.py", env=TEST_ENV)


@nox.session
def reproduce(session: nox.Session) -> None:
    """ORL, its ablations and controls from end to end, with the report; arguments after -- go to the command.

    Hours on two cores; the same command continues where it was stopped.
    """
    sync(session)
    command = ["orl-train", "reproduce", "recipes/reproduce.toml", "--out", "runs/reproduce"]
    session.run(*command, "--docs", "docs/reproduction.md", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """What docs/benchmarks.md reports, measured on this machine; leave it idle meanwhile."""
    sync(session)
    session.run("dlmrt", "bench", "--model", "embedded:base", "--prompts", "8", "--repeat", "3")
    beside = ["--compare", "transformers", "--prompts", "4", "--repeat", "7", "--max-new-tokens", "128"]
    session.run("dlmrt", "bench", "--model", "random:diffusion_gemma", *beside)
    session.run("orl-train", "bench")


@nox.session
def gpu(session: nox.Session) -> None:
    """On a CUDA device: the staircase kernel against float64."""
    sync(session)
    session.run("python", "-c", "import torch; assert torch.cuda.is_available(), 'there is no CUDA device'")
    session.run("pytest", "packages/orl-train/tests/attention/test_triton_attention.py", *session.posargs)

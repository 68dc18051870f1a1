"""What the cross-package tests share: the packages, their manifests and sources."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Package:
    """One member of the workspace."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        return self.manifest["project"]["name"]

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def sources(self) -> list[Path]:
        return sorted((self.folder / "src").rglob("*.py"))


def read_package(folder: Path) -> Package:
    return Package(folder, tomllib.loads((folder / "pyproject.toml").read_text()))


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def packages() -> dict[str, Package]:
    """The members of the workspace by name."""
    found = [read_package(manifest.parent) for manifest in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    return {package.name: package for package in found}

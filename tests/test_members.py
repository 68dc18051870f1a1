"""Every member can be released alone: version, changelog, licence, readme and ranges between members."""

import importlib
import re
from importlib.metadata import version
from itertools import chain

import pytest
from packaging.requirements import Requirement

MEMBERS = ["orl-core", "dlmrt", "orl-train", "orl-eval", "orl-serve"]


def test_the_workspace_has_these_members(packages):
    assert set(packages) == set(MEMBERS)


@pytest.mark.parametrize("name", MEMBERS)
def test_version_is_stated_once(packages, name):
    package = packages[name]
    stated = package.manifest["project"]["version"]
    assert importlib.import_module(package.module).__version__ == version(name) == stated


@pytest.mark.parametrize("name", MEMBERS)
def test_changelog_begins_with_the_current_version(packages, name):
    package = packages[name]
    headings = re.findall(r"^## (\S+)", (package.folder / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == package.manifest["project"]["version"]


@pytest.mark.parametrize("name", MEMBERS)
def test_licence_and_readme_travel_with_the_package(root, packages, name):
    package = packages[name]
    assert (package.folder / "LICENSE").read_bytes() == (root / "LICENSE").read_bytes()
    assert len((package.folder / "README.md").read_text().split()) > 30
    assert package.manifest["project"]["license"] == "Apache-2.0"


@pytest.mark.parametrize("name", MEMBERS)
def test_ranges_between_members_hold_the_current_versions(packages, name):
    project = packages[name].manifest["project"]
    extras = project.get("optional-dependencies", {}).values()
    for requirement in map(Requirement, chain(project.get("dependencies", []), *extras)):
        if requirement.name in packages:
            current = packages[requirement.name].manifest["project"]["version"]
            assert requirement.specifier.contains(current), f"{name} wants {requirement}, the workspace has {current}"
            assert "<" in str(requirement.specifier), f"{name} wants {requirement} without an upper bound"

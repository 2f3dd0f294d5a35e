"""What pyproject.toml says is what the repository holds: a wheel lacks no room."""

import tomllib
from pathlib import Path

from tests.unit.test_import_rules import source_files

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_listed() -> None:
    folders = {Path(name).parent for name in source_files()}
    found = {"nightjar", *(".".join(["nightjar", *f.parts]) for f in folders)} - {
        "nightjar.nightjar"
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders)


def test_every_dependency_is_pinned_by_the_constraints() -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    }
    project = PROJECT["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {_name(requirement) for requirement in wanted} - {"nightjar-batch"}
    assert names <= pinned


def _name(requirement: str) -> str:
    for mark in "[<>=; ":
        requirement = requirement.partition(mark)[0]
    return requirement.lower().replace("_", "-")

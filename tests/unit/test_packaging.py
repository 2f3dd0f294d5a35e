"""What is installed is what a checkout holds: pyproject.toml names every package."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("checkpoints", "gpu_worker", "jobs", "kernels", "migrations", "pipeline")


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(["nightjar", *init.parent.relative_to(ROOT).parts])
        for room in ROOMS
        for init in (ROOT / room).rglob("__init__.py")
    }
    assert set(listed) == found | {"nightjar"}

"""What pyproject.toml says is what the repository holds: a wheel lacks no room."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from tests.source_tree import source_files

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("report.css", "report.html.j2", "model.html.j2")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_listed() -> None:
    folders = {Path(name).parent for name in source_files()}
    found = {"nightjar", *(".".join(["nightjar", *f.parts]) for f in folders)} - {
        "nightjar.nightjar"
    }
    # A list: a package that stands there twice is seen.
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(found)
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders)


def test_the_wheel_holds_every_module(tmp_path: Path) -> None:
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    # A copy: what an earlier build left in the checkout must not fill gaps.
    for name in filter(_is_packaged, files):
        copy = tmp_path / "checkout" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy, follow_symlinks=False)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(tmp_path / "checkout")],
        check=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        held = set(opened.namelist())
    wanted = {f"nightjar/{name.removeprefix('nightjar/')}" for name in source_files()}
    wanted |= {"nightjar/migrations/script.py.mako", "nightjar/py.typed"}
    wanted |= {f"nightjar/jobs/report/{name}" for name in PAGES}
    wanted |= {
        f"nightjar/kernels/{folder}/{file.name}"
        for folder in ("cuda", "native")
        for file in (ROOT / "kernels" / folder).iterdir()
        if file.suffix in (".cpp", ".cu", ".cuh", ".h", ".json")
    }
    page = ROOT / "jobs" / "api" / "page"
    wanted |= {
        f"nightjar/{file.relative_to(ROOT)}"
        for folder in ("templates", "static")
        for file in (page / folder).rglob("*.*")
    }
    assert wanted - held == set()
    strangers = {name for name in held - wanted if ".dist-info/" not in name}
    assert strangers <= {"nightjar/__init__.py"}


def _is_packaged(name: str) -> bool:
    rooms = ("nightjar", "checkpoints", "gpu_worker", "jobs", "kernels", "migrations", "pipeline")
    kept = ("pyproject.toml", "README.md", "LICENSE")
    return (name in kept or name.partition("/")[0] in rooms) and os.path.lexists(ROOT / name)


def test_every_dependency_is_pinned_by_the_constraints() -> None:
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    }
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["dev"] + extras["mutants"]
    names = {_name(requirement) for requirement in wanted} - {"nightjar-batch"}
    assert names <= pinned


def _name(requirement: str) -> str:
    for mark in "[<>=; ":
        requirement = requirement.partition(mark)[0]
    return requirement.lower().replace("_", "-")

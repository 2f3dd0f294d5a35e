"""`pytest -m gpu` and the GPU benchmarks need no more than a bare GPU machine has."""

import ast
import os
import re
import subprocess
import sys
from collections import deque
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

from tests.bare_machine import DISTRIBUTIONS, GPU_FOLDERS, PACKAGES, asks_for_gpu_alone

ROOT = Path(__file__).resolve().parents[2]
OURS = {"nightjar", "tests", "benchmarks", "tools"}
FOLDERS = [folder for folder in GPU_FOLDERS if (ROOT / "tests" / folder).is_dir()]
STARTS = [
    "tests/conftest.py",
    *(f"tests/{folder}" for folder in FOLDERS),
    "benchmarks/gpu",
    "tools/first_gpu_hour",
    "tools/gpu_hour",
]
# Imported by the conftest only where SQLAlchemy is installed.
OPTIONAL = {"tests.databases"}


def files(start: str) -> list[Path]:
    path = ROOT / start
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def module_file(name: str) -> Path | None:
    """The file of a module of ours, or None where the name is that of something inside one."""
    path = ROOT.joinpath(*name.split("."))
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    return path / "__init__.py" if (path / "__init__.py").is_file() else None


def is_for_types(node: ast.AST) -> bool:
    """Whether this is `if TYPE_CHECKING:`, without an else."""
    if not isinstance(node, ast.If) or node.orelse:
        return False
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@cache
def imported(path: Path) -> set[str]:
    """Every module that a file may import, and whatever stands in `from` imports.

    What is imported for types alone never runs.
    """
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        node for block in ast.walk(tree) if is_for_types(block) for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def needs(starts: list[Path]) -> dict[str, set[str]]:
    """Third-party packages that these files and all of ours that they import need, with the files
    that name each."""
    waiting, seen, found = deque(starts), set(starts), {}
    while waiting:
        path = waiting.popleft()
        for name in imported(path) - OPTIONAL:
            top = name.partition(".")[0]
            if top not in OURS:
                if top and top not in sys.stdlib_module_names:
                    found.setdefault(top, set()).add(str(path.relative_to(ROOT)))
                continue
            parts = name.split(".")
            for end in range(1, len(parts) + 1):  # a package's own __init__ runs as well
                file = module_file(".".join(parts[:end]))
                if file is not None and file not in seen:
                    seen.add(file)
                    waiting.append(file)
    return found


@pytest.mark.parametrize("start", STARTS)
def test_gpu_code_imports_what_a_bare_machine_has(start):
    found = needs(files(start))
    assert files(start)
    assert {name: where for name, where in found.items() if name not in PACKAGES} == {}


def test_imports_for_types_alone_are_told_from_others():
    tree = ast.parse("if TYPE_CHECKING:\n import a\nif DEBUG:\n import b\n")
    assert [is_for_types(node) for node in tree.body] == [True, False]


def test_an_import_through_another_file_is_seen(tmp_path):
    names = needs(files("tests/databases.py"))
    assert "sqlalchemy" in names
    assert "psycopg" in names  # inside a function
    through = needs(files("tests/integration/test_store_reading.py"))
    assert any("jobs/" in where for where in through["sqlalchemy"])


def test_tests_for_a_gpu_lie_in_their_folders():
    marked = {
        path.relative_to(ROOT / "tests").parts[0]
        for path in files("tests")
        if re.search(r"mark\.gpu\b", path.read_text(encoding="utf-8")) and path != Path(__file__)
    }
    assert marked == set(FOLDERS)


@pytest.mark.parametrize(
    ("expression", "alone"),
    [
        ("gpu", True),
        ("gpu and not slow", True),
        ("not slow and gpu", True),
        ("", False),
        ("not gpu", False),
        ("not slow and not gpu", False),
        ("gpu or slow", False),
        ("gpu and slow or unit", False),
    ],
)
def test_mark_expressions_that_take_gpu_tests_alone(expression, alone):
    assert asks_for_gpu_alone(expression) is alone


def test_who_asks_for_gpu_tests_without_a_gpu_is_told_once():
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/kernels_cuda/test_upload.py"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout[-2000:]
    assert (done.stdout + done.stderr).count("torch sees no CUDA device") == 1


def brought_along() -> set[str]:
    """The distributions of a bare machine with all that they need, by normalised name."""
    waiting, found = list(DISTRIBUTIONS), set()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            needed = requires(name) or []
        except PackageNotFoundError:  # CuPy, here
            continue
        waiting += [
            re.split(r"[\s;<>=!~\[(]", line)[0] for line in needed if "extra ==" not in line
        ]
    return found


def test_all_gpu_tests_are_found_where_nothing_else_is_installed():
    """With every other package of this environment out of reach, pytest's plugins among them."""
    kept = brought_along()
    hidden = [
        name
        for name, owners in packages_distributions().items()
        if kept.isdisjoint(re.sub(r"[-_.]+", "-", owner).lower() for owner in owners)
        and name not in OURS
    ]
    assert {"celery", "sqlalchemy", "hypothesis", "pytest_timeout"} <= set(hidden)
    # None in sys.modules: importing it fails, and find_spec finds nothing.
    code = (
        "import sys; sys.modules.update(dict.fromkeys(sys.argv[1].split(',')))\n"
        "import pytest; sys.exit(pytest.main(sys.argv[2:]))"
    )
    options = ["-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-c", code, ",".join(hidden), *options],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    collected = {line.split("/")[1] for line in done.stdout.splitlines() if "::" in line}
    assert collected == set(FOLDERS)

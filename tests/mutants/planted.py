"""A tiny tree with a module and its tests, for the tests of the tool itself."""

import subprocess
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.trials import POSTGRESQL, SQLITE, Plan

MODULE = "house/store.py"
TESTS = {MODULE: ["checks/test_store.py"]}
SOURCE = '''\
"""A store."""


def free(taken, most):
    """Whether there is room."""
    return taken < most


def lock(database_url):
    """How a row is locked."""
    return "for update" if database_url == "postgresql" else ""


def wait(tries):
    """Count down."""
    while tries > 0:
        tries -= 1
    return tries
'''
# `free` is not tried at its edge.
_TESTS = """\
import os
import subprocess

import pytest

from house.links import store


def test_free():
    assert store.free(1, 3)
    assert not store.free(4, 3)


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"])
def test_lock(database_url):
    assert bool(store.lock(database_url)) == (database_url == "postgresql")


def test_wait():
    assert store.wait(2) == 0


def test_leaves_a_process_behind():
    left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    left.returncode = 0  # no warning that it runs
    with open(os.environ["LEFT_BEHIND"], "a") as file:
        file.write(f"{left.pid}\\n")
"""


def plant(folder: Path, *, tests: str = _TESTS) -> Plan:
    """Lay the tree down under `folder`; its package reaches the module through a link."""
    root, work = folder / "root", folder / "work"
    for name in ("house", "checks"):
        (root / name).mkdir(parents=True)
    (root / "house" / "links").symlink_to("../house")
    (root / "house" / "__init__.py").touch()
    (root / MODULE).write_text(SOURCE)
    (root / TESTS[MODULE][0]).write_text(tests)
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    gpu\n")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    return Plan(
        root=root,
        work=work,
        tests=TESTS,
        databases=[SQLITE, POSTGRESQL],
        jobs=1,
        budget_s=60.0,
        environment={
            "LEFT_BEHIND": str(folder / "left-behind"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # a second each time
        },
        slack_s=2.5,
        preloaded=("hypothesis",),
    )


def mutant(before: str, after: str) -> Mutant:
    """The planted module with a line of it changed."""
    assert SOURCE.count(before) == 1
    text = SOURCE.replace(before, after)
    line = SOURCE[: SOURCE.index(before)].count("\n") + 1
    return Mutant(MODULE, "somewhere", before, after, line, "ByHand", text)

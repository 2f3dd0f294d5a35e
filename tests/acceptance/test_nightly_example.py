"""The guide "Recommendation pipeline", as a reader runs it."""

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.processes import NIGHTJAR

pytest.importorskip("nightjar.pipeline.tasks")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the example beside the demo model."""
    (tmp_path / "demo_model").symlink_to(EXAMPLES / "demo_model")
    ours = shutil.ignore_patterns("data", "*.work", "answers.db*", "__pycache__")
    return Path(shutil.copytree(EXAMPLES / "nightly", tmp_path / "nightly", ignore=ours))


def run(folder: Path, *command: str, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def rows(folder: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(folder / "data" / "shop.db")) as shop:
        return shop.execute(query).fetchall()


def test_users_are_ranked_without_a_line_of_code(folder: Path) -> None:
    run(folder, sys.executable, "make_data.py")
    run(folder, *NIGHTJAR, "run", "rank.toml", NIGHTJAR_ENGINE="fake")
    found = rows(folder, "SELECT count(*), count(error_code) FROM recommendations")
    assert found == [(200, 0)]
    (ranking,) = rows(folder, "SELECT ranking FROM recommendations LIMIT 1")[0]
    assert sorted(ranking.strip("[]").split(",")) == list("01234567")


@pytest.mark.slow
def test_two_nights(folder: Path) -> None:
    reuse = ["--reuse-results", "answers.db"]
    said = []
    for night in ("1", "2"):
        run(folder, sys.executable, "make_data.py", "--night", night)
        for task in ("describe.toml", "rank.toml"):
            said.append(run(folder, *NIGHTJAR, "run", task, *reuse))
    shown = run(folder, sys.executable, "show.py", "--users", "1000")
    assert len(shown.splitlines()) == 201
    assert rows(folder, "SELECT count(*) FROM descriptions") == [(31,)]
    assert rows(folder, "SELECT count(*) FROM descriptions WHERE sku = 'P031'") == [(0,)]
    assert "30 answers were shared" in said[2]  # one product has a new name, one is gone
    # One user is new, and other users' rankings have scored each of his candidates.
    assert "201 answers were shared" in said[3]

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
from tests.scenes import copy_examples, playing

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


@pytest.mark.slow
def test_users_are_ranked_without_a_line_of_code(folder: Path) -> None:
    run(folder, sys.executable, "make_data.py")
    run(folder, *NIGHTJAR, "run", "rank.toml", NIGHTJAR_ENGINE="fake")
    found = rows(folder, "SELECT count(*), count(error_code) FROM recommendations")
    assert found == [(200, 0)]
    (ranking,) = rows(folder, "SELECT ranking FROM recommendations LIMIT 1")[0]
    assert sorted(ranking.strip("[]").split(",")) == list("01234567")


@pytest.mark.slow
def test_two_nights(tmp_path: Path) -> None:
    """The blocks of the guide, as they are written."""
    copy_examples(tmp_path)
    nightly = tmp_path / "examples" / "nightly"
    with playing("nightly", tmp_path, {}) as scene:
        scene.run("source")
        for task in ("describe", "rank"):
            told = scene.run(f"nightjar run examples/nightly/{task}.toml", more="\nls")
            assert "answers.db" in told
        second = scene.text("python examples/nightly/make_data.py --night 2")
        said = scene.shell(f"exec 2>&1\n{second}")
        shown = scene.shell("python examples/nightly/show.py --users 1000")
    assert len(shown.splitlines()) == 201
    assert rows(nightly, "SELECT count(*) FROM descriptions") == [(31,)]
    assert rows(nightly, "SELECT count(*) FROM descriptions WHERE sku = 'P031'") == [(0,)]
    assert "30 answers were shared" in said  # one product has a new name, one is gone
    # One user is new, and other users' rankings have scored each of his candidates.
    assert "201 answers were shared" in said

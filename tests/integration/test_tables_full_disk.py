"""A sink's disk fills up in the middle of a write: the old rows stay, and the run goes on later."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.integration.full_sink import ROWS, command
from tests.small_disk import require_mounting

SQL = ("sqlite", "postgresql")
FILES = {"folder": ["out"], "sqlite": ["own.db"], "postgresql": ["data"]}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder", *SQL])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, kind: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    require_mounting()
    run = subprocess.run(
        command(disk, kind), check=False, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert "cannot be written" in told["failure"]
    assert "full" in told["failure"] or "No space" in told["failure"]
    assert "run this again" in told["failure"]
    assert told["while_full"] == [["a", "old"]]
    # A table keeps the row of the earlier run.
    assert told["rows"] == ROWS + (kind in SQL)
    # Files are written anew; the database has kept what was staged before the disk was full.
    assert (told["staged"] >= 0) == (kind in SQL)
    assert told["tables"] == (["answers", "nightjar_sinks"] if kind in SQL else [])
    assert told["files"] == FILES.get(kind, [f"out.{kind}"])

"""A sink's disk fills up in the middle of a write: the old rows stay, and are replaced later."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.full_sink import command


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder", "sqlite"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, kind: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    line = command(disk, kind)
    if subprocess.run([*line[: line.index("sh")], "true"], check=False).returncode:
        if os.environ.get("CI"):
            pytest.fail("this machine lets nobody mount a disk of his own")
        pytest.skip("this machine lets nobody mount a disk of his own")
    run = subprocess.run(line, check=False, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert "cannot be written" in told["failure"]
    assert "full" in told["failure"] or "No space" in told["failure"]
    assert "run this again" in told["failure"]
    assert told["while_full"] == [["a", "old"]]
    assert told["after"] == [["a", "new"]]
    expected = {"sqlite": "own.db", "folder": "out"}.get(kind, f"out.{kind}")
    assert told["left"] == [expected]

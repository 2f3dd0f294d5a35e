"""The disk of the database fills up under a system at work, and is freed again."""

import json
import pickle
import subprocess
from pathlib import Path

import pytest

from tests.faults.conftest import Note
from tests.faults.full_disk import command
from tests.faults.oracle import Answers, Verdict
from tests.small_disk import require_mounting


@pytest.mark.slow
def test_a_full_disk_makes_work_wait_and_loses_nothing(
    database_url: str, tiny_model: Path, tmp_path: Path, undisturbed: Answers, note: Note
) -> None:
    kind = "sqlite" if database_url.startswith("sqlite") else "postgresql"
    disk, answers = tmp_path / "disk", tmp_path / "answers"
    disk.mkdir()
    answers.write_bytes(pickle.dumps(undisturbed))
    line = command(kind, disk, tmp_path, tiny_model, answers)
    require_mounting()
    run = subprocess.run(line, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    verdict = Verdict(**told["verdict"])
    said = "work waited, results land again"
    note(12, "disk full", 1, verdict, recovery_s=told["recovery_s"], note=said)
    # A server that ends for want of room may forget claims; nobody else computes again.
    verdict.check(0)
    assert told["restarted"] == {}
    assert "not available" in told["told"]

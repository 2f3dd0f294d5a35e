"""A run on a disk of its own that fills up half-way, told as JSON on standard output.

    unshare --user --map-root-user --mount python -m tests.acceptance.full_disk DISK IN MODEL

DISK is an empty directory: a small file system is mounted there, which nobody else sees.
"""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

from tests.processes import NIGHTJAR, read_lines, wait_until

DISK_BYTES = 80 << 20
CHUNK = bytes(1 << 20)


def landed(database: Path) -> int:
    """How many results the store holds."""
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as opened,
    ):
        return int(opened.execute("SELECT count(*) FROM result").fetchone()[0])
    return 0  # no tables yet


def fill(path: Path) -> int:
    """Write until the disk takes no more; returns the bytes that it took."""
    taken = 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        with suppress(OSError):
            while True:
                taken += os.write(handle, CHUNK)
    finally:
        os.close(handle)
    return taken


def main(disk: Path, source: Path, model: Path) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)], check=True
    )
    out, filler = disk / "out.jsonl", disk / "filler"
    command = [*NIGHTJAR, "run", str(source), "--model", str(model), "--out", str(out)]
    database = disk / "out.jsonl.work" / "nightjar.db"
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until("the first results", lambda: landed(database) or first.poll() is not None)
        filled = fill(filler)
        _, said = first.communicate(timeout=60)
    finally:
        first.terminate()  # a run that has ended does not mind
    filler.unlink()
    kept = landed(database)
    again = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    told = {
        "filled_bytes": filled,
        "status": first.returncode,
        "said": said,
        "landed": kept,
        "status_again": again.returncode,
        "said_again": again.stderr,
        "custom_ids": [line["custom_id"] for line in read_lines(out)] if out.exists() else [],
    }
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

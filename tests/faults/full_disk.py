"""A system whose database's disk fills up and is freed again, told as JSON on standard output.

    python -m tests.faults.full_disk KIND DISK FOLDER MODEL ANSWERS

KIND is sqlite or postgresql, DISK a small file system for the database alone, FOLDER the place of
the logs, ANSWERS a pickle of what an undisturbed run answers. `command` mounts the disk, which
nobody else sees, and runs this as an ordinary user: PostgreSQL does not serve root.
"""

import json
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from nightjar.jobs.errors import StoreError, StoreUnavailableError
from nightjar.jobs.records import NewJob
from tests import small_disk
from tests.acceptance.full_disk import fill
from tests.faults.oracle import judge
from tests.faults.postgres import private_postgres
from tests.faults.rows import request_rows
from tests.faults.system import System, running_system

DISK_BYTES = {"sqlite": 16 << 20, "postgresql": 160 << 20}
FULL_S = 15.0  # longer than a worker may be silent
ROWS = 1_000


def command(kind: str, disk: Path, *arguments: Path) -> list[str]:
    """The command line that runs this file with a disk of its own mounted at `disk`."""
    return small_disk.command(
        __name__, disk, DISK_BYTES[kind], kind, disk, *arguments, ordinary_user=True
    )


class Disk:
    """The disk with a database on it.

    Args:
        url: Of the database.
        path: Where the disk is mounted.
        start: Starts the database's server if it has ended: PostgreSQL does when it cannot write
            its log.
    """

    def __init__(self, url: str, path: Path, start: Callable[[], None]) -> None:
        self.url = url
        self._start = start
        self._filler = path / "filler"

    def fill(self) -> None:
        """Leave no room."""
        fill(self._filler)

    def free(self) -> None:
        """Make room again."""
        self._filler.unlink()
        self._start()


@contextmanager
def disk_with_database(kind: str, path: Path) -> Iterator[Disk]:
    """The disk, and the database on it."""
    if kind == "sqlite":
        yield Disk(f"sqlite:///{path / 'nightjar.db'}", path, lambda: None)
        return
    with private_postgres(path / "data") as server, server.fresh_database() as url:
        yield Disk(url, path, server.start)


def refusal(system: System) -> str:
    """What a submission is told while the disk is full, "" if it is taken."""
    try:
        with system.store.jobs.submit(NewJob("tiny")) as submission:
            submission.add(request_rows(ROWS))
    except StoreUnavailableError as error:
        return str(error)
    system.jobs.append(submission.job_id)
    return ""


def ended(system: System) -> int:
    try:
        return sum(system.store.jobs.get(job_id).ended for job_id in system.jobs)
    except StoreError:
        return -1


def main(kind: str, disk_path: Path, folder: Path, model: Path, expected: Path) -> None:
    with (
        disk_with_database(kind, disk_path) as disk,
        running_system(folder, disk.url, model) as system,
    ):
        system.submit(ROWS)
        system.wait_until("results", lambda: ended(system) > 0)
        disk.fill()
        told, until = "", time.monotonic() + FULL_S
        while time.monotonic() < until:
            told = told or refusal(system)
            time.sleep(0.2)
        held = [ended(system)]
        restarted = dict(system.restarted)
        disk.free()
        back = system.wait_until("results", lambda: ended(system) > max(held[0], 0))
        system.wait_done()
        verdict = judge(system, pickle.loads(expected.read_bytes()))  # noqa: S301  # our own
        said = {name: system.log(name) for name in system.services}
    answer = {
        "verdict": asdict(verdict),
        "told": told,
        "landed_while_full": held[0],
        "recovery_s": back,
        "restarted": restarted,
        "waited": sum("wait for the database" in log for log in said.values()),
    }
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))

"""What every fault test has: the answers of an undisturbed run, and a place for its row."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.oracle import Verdict, answers, judge
from tests.faults.report import Row
from tests.faults.rows import MOST_ROWS
from tests.faults.system import HASTE, STEADY, System, running_system

Note = Callable[..., None]


def undisturbed_answers(folder: Path, model: Path, rows: int) -> Mapping[str, Any]:
    """What every row is answered when nobody dies."""
    url = f"sqlite:///{folder / 'nightjar.db'}"
    with running_system(folder, url, model, environment=HASTE) as system:
        job_id = system.submit(rows)
        system.wait_done()
        found = answers(system.store, job_id)
        assert system.store.jobs.get(job_id).completed == rows
    assert len({str(answer) for answer in found.values()}) > rows // 2
    return found


@pytest.fixture(scope="session")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """The answers to the rows of most jobs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return undisturbed_answers(folder, tiny_model, MOST_ROWS)


@pytest.fixture
def note(record_property: Callable[[str, object], None], database_url: str) -> Note:
    """Hand in the table's row for what this test did and found."""

    def hand_in(number: int, fault: str, times: int, verdict: Verdict, **more: Any) -> None:
        kind = "SQLite" if database_url.startswith("sqlite") else "PostgreSQL"
        row = Row(number, fault, "Nightjar", kind, times, **_figures(verdict), **more)
        record_property("fault", row.as_json())

    return hand_in


def _figures(verdict: Verdict) -> dict[str, int]:
    return {
        "requests": verdict.requests,
        "lost": verdict.lost,
        "twice": verdict.twice,
        "recomputed": verdict.recomputed,
    }


@dataclass(frozen=True, slots=True)
class Place:
    """Where a fault test happens, and what it needs there."""

    folder: Path
    database_url: str
    model: Path
    undisturbed: Mapping[str, Any]
    note: Note

    def system(
        self,
        *,
        workers: int = 1,
        environment: Mapping[str, str] = HASTE | STEADY,
        prepare: Callable[[System], None] = lambda _: None,
    ) -> AbstractContextManager[System]:
        """A running system on this database."""
        return running_system(
            self.folder,
            self.database_url,
            self.model,
            workers=workers,
            environment=environment,
            prepare=prepare,
        )

    def judge(
        self, system: System, number: int, fault: str, times: int, *, note: str = "", **more: Any
    ) -> Verdict:
        """Look at what became of the work, and hand in the table's row.

        Call it before what may fail: the row then shows it.
        """
        verdict = judge(system, self.undisturbed)
        ended = [f"{name} ended {n} times" for name, n in sorted(system.restarted.items())]
        said = "; ".join(filter(None, [note, *ended]))
        self.note(number, fault, times, verdict, note=said, **more)
        return verdict


@pytest.fixture
def place(
    tmp_path: Path,
    database_url: str,
    tiny_model: Path,
    undisturbed: Mapping[str, Any],
    note: Note,
) -> Place:
    """A place for each kind of database."""
    return Place(tmp_path, database_url, tiny_model, undisturbed, note)

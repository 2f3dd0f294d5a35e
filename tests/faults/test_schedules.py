"""Schedules of every minute, while beats die, planners die, and the machine's clock is set back.

The clock of the whole deployment, a PostgreSQL server of its own included, is moved from one minute
to the next, so that a night takes seconds. Each planned time makes one run, with one batch.
"""

import hashlib
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from nightjar.jobs.file_records import NewFile
from nightjar.jobs.schedule_records import (
    Definition,
    NewSchedule,
    RunState,
    ScheduleRun,
    WhenRunning,
)
from nightjar.jobs.schedules.times import next_of
from tests.faults.clocks import WrongClock
from tests.faults.conftest import Note
from tests.faults.oracle import Answers, judge
from tests.faults.postgres import private_postgres
from tests.faults.rows import batch_file
from tests.faults.system import BEAT, BROKER, PLANNER, System, running_system

ROWS = 4
NIGHTS = 20
ROUNDS = 8
MINUTE = timedelta(minutes=1)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Nights:
    """A running system with a schedule of every minute, and the clock that all of it shows."""

    def __init__(self, system: System, clock: WrongClock) -> None:
        self.system = system
        self.store = system.store
        self._clock = clock
        self._shift_s = 0
        data = batch_file(ROWS)
        file_id = self.store.files.begin(NewFile("default", "in.jsonl"))
        self.store.files.append(file_id, 0, data)
        self.store.files.end(file_id, len(data), hashlib.sha256(data).hexdigest())
        every_minute = Definition(
            "* * * * *",
            file_id=file_id,
            endpoint="/v1/completions",
            when_still_running=WhenRunning.QUEUE,
        )
        first = next_of(every_minute, self.now() + MINUTE)
        assert first is not None
        self.first = self.next_night = first
        self.schedule = self.store.schedules.create(
            NewSchedule("nightly", every_minute), "test", first
        )

    def now(self) -> datetime:
        """What the deployment's clocks show."""
        return datetime.now(UTC) + timedelta(seconds=self._shift_s)

    def go_to(self, moment: datetime) -> None:
        """Set the clocks to at most a second before a moment."""
        self._shift_s += int((moment - self.now()).total_seconds() // 1)
        self._clock.shift(self._shift_s)
        if not self.store.database.is_sqlite:
            shown = self.store.schedule_runs.clock()
            assert abs((shown - self.now()).total_seconds()) < 5, "PostgreSQL's clock was not set"

    def wait_for(self, moment: datetime) -> None:
        """Until the clocks show it."""
        time.sleep(max(0.0, (moment - self.now()).total_seconds()))

    def runs(self) -> list[ScheduleRun]:
        """All runs, the oldest planned time first."""
        found = self.store.schedule_runs.newest(self.schedule.id, 1_000)
        return sorted(found, key=lambda run: run.planned_at)

    def wait_for_run(self) -> None:
        """Until the run of the next night is over; the night after it is the next one then."""
        night = self.next_night
        self.system.wait_until(
            f"the run of {night}",
            lambda: any(run.planned_at == night and run.ended_at for run in self.runs()),
            patience_s=120,
        )
        self.next_night = self.runs()[-1].planned_at + MINUTE

    def check_each_once(self) -> None:
        """Each planned time from the first on has one run, and each run one batch of its own."""
        runs = [run for run in self.runs() if run.planned_at >= self.first]
        planned = [run.planned_at for run in runs]
        assert planned[0] == self.first
        assert len(set(planned)) == len(planned)
        # A machine that is busy for longer than a minute has missed that minute, and says so.
        passed = int((planned[-1] - planned[0]) / MINUTE) + 1
        assert len(runs) + sum(run.missed for run in runs) == passed
        assert {run.state for run in self.runs()} == {RunState.SUCCEEDED}
        jobs = [run.job_id for run in self.runs()]
        assert sorted(map(str, jobs)) == sorted(job.id for job in self.store.jobs.newest(1_000))
        self.system.jobs = [str(job_id) for job_id in jobs]


@pytest.fixture
def clock() -> Iterator[WrongClock]:
    """One clock for all; PostgreSQL's own user must get at it."""
    folder = Path(tempfile.mkdtemp(prefix="nightjar-clock-"))
    folder.chmod(0o755)
    yield WrongClock(folder, "machine")
    shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(
    request: pytest.FixtureRequest, sqlite_url: str, clock: WrongClock
) -> Iterator[str]:
    """A database whose clock is that one, too."""
    if request.param == "sqlite":
        yield sqlite_url
        return
    with private_postgres(environment=clock.environment) as server, server.fresh_database() as url:
        yield url


@pytest.fixture
def nights(
    database_url: str, tiny_model: Path, tmp_path: Path, clock: WrongClock
) -> Iterator[Nights]:
    def prepare(system: System) -> None:
        for name, service in system.services.items():
            if name != BROKER:
                service.environment = {**service.environment, **clock.environment}

    with running_system(tmp_path, database_url, tiny_model, prepare=prepare) as system:
        yield Nights(system, clock)


@pytest.mark.parametrize("victim", [BEAT, PLANNER])
def test_a_process_killed_at_the_minute_itself(
    nights: Nights, victim: str, undisturbed: Answers, note: Note
) -> None:
    rng = random.Random(27)
    for _ in range(NIGHTS):
        nights.go_to(nights.next_night)
        nights.wait_for(nights.next_night + timedelta(seconds=rng.uniform(-0.1, 0.4)))
        nights.system.kill(victim)
        nights.system.start(victim)
        nights.wait_for_run()
    nights.check_each_once()
    verdict = judge(nights.system, undisturbed)
    told = f"{NIGHTS} planned times, each ran once"
    note(27, f"{victim} SIGKILL at the minute of a schedule", NIGHTS, verdict, note=told)
    verdict.check(0)
    assert nights.system.restarted.total() == 0


def test_two_beats_and_two_planners_at_once(
    nights: Nights, undisturbed: Answers, note: Note
) -> None:
    system = nights.system
    names = [BEAT, PLANNER, system.start_another(BEAT), system.start_another(PLANNER)]
    system.wait_until("both planners", lambda: " ready" in system.log(names[-1]), 120)
    for _ in range(NIGHTS):
        nights.go_to(nights.next_night)
        nights.wait_for_run()
    assert all(map(system.is_running, names))
    assert system.restarted.total() == 0
    nights.check_each_once()
    verdict = judge(system, undisturbed)
    told = f"{NIGHTS} planned times, each ran once"
    note(27, "two beats and two planners at a schedule's minute", NIGHTS, verdict, note=told)
    verdict.check(0)


def test_a_clock_that_is_set_back(nights: Nights, undisturbed: Answers, note: Note) -> None:
    """Two minutes that have run are lived again; the minute after them runs."""
    for _ in range(2):
        nights.go_to(nights.next_night)
        nights.wait_for_run()
    for _ in range(ROUNDS):
        before = nights.runs()
        for ago in (2, 1):
            again = nights.next_night - ago * MINUTE
            nights.go_to(again)
            nights.wait_for(again + timedelta(seconds=2))
        assert nights.runs() == before
        nights.go_to(nights.next_night)
        nights.wait_for_run()
    nights.go_to(nights.now() - timedelta(hours=1))
    time.sleep(5)
    nights.go_to(nights.next_night)
    nights.wait_for_run()
    nights.check_each_once()
    verdict = judge(nights.system, undisturbed)
    told = f"{2 * ROUNDS} minutes lived twice ran once; the next minute ran"
    note(27, "the clock set back over a schedule's minutes", ROUNDS + 1, verdict, note=told)
    verdict.check(0)

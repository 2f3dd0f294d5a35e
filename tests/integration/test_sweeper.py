"""The sweeper over real stores: what stands still on its own clock loses its lease."""

import hashlib
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing

import pytest
import sqlalchemy as sa

from nightjar.jobs.errors import StoreUnavailableError
from nightjar.jobs.file_records import NewFile
from nightjar.jobs.records import MicroBatchRef, NewJob, NewRequest
from nightjar.jobs.states import JobState, RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.file_tables import file_part
from nightjar.jobs.store.purging import ROWS_PER_STEP
from nightjar.jobs.workers import ComputeSeconds
from nightjar.pipeline.queue.liveness import owner_name
from nightjar.pipeline.queue.sweeper import Sweeper, SweepReport
from tests.bulk_jobs import finished_job, results_kept
from tests.clock import Clock
from tests.jobs import planned
from tests.outcomes import compute


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sweeper(store: Store, clock: Clock) -> Sweeper:
    return Sweeper(
        store,
        dead_after_s=10,
        redispatch_after_s=60,
        longest_gap_s=4,
        deaths_allowed=3,
        clock=clock,
    )


def watch(sweeper: Sweeper, clock: Clock, seconds: float) -> SweepReport:
    """Look every two seconds, as the planner does; returns what the looks did together."""
    released = requeued = 0
    while seconds > 0:
        clock.now += min(2, seconds)
        seconds -= 2
        report = sweeper.sweep()
        released += report.released
        requeued += report.requeued
    return SweepReport(released, requeued)


def claim(store: Store, ref: MicroBatchRef, owner: str) -> None:
    store.heartbeats.beat(owner, ComputeSeconds())
    assert store.leases.claim(ref.id, ref.epoch, owner) is not None


def test_a_silent_worker_loses_its_leases_and_a_living_one_does_not(
    store: Store, sweeper: Sweeper, clock: Clock
) -> None:
    _, (first, second, third) = planned(store, 3)
    claim(store, first, "silent")
    claim(store, second, "silent")
    claim(store, third, "alive")
    assert sweeper.sweep() == SweepReport(released=0, requeued=0)
    assert watch(sweeper, clock, 9.9) == SweepReport(released=0, requeued=0)
    store.heartbeats.beat("alive", ComputeSeconds())
    assert watch(sweeper, clock, 0.1) == SweepReport(released=2, requeued=0)
    assert [(ref.size, ref.epoch, ref.isolated) for ref in store.planning.dispatchable(10)] == [
        (1, 0, True),
        (1, 0, True),
    ]
    assert store.leases.claim(first.id, 0, "late") is None
    assert store.leases.finish(second.id, 0, "silent", []) is False


def test_a_job_past_its_deadline_is_ended(store: Store, sweeper: Sweeper) -> None:
    row = NewRequest(0, 1, "row-0", RequestKind.GENERATE, {"prompt": "a"})
    with store.jobs.submit(NewJob("tiny", completion_window_s=0.001)) as submission:
        submission.add([row])
    time.sleep(0.01)
    assert sweeper.sweep() == SweepReport(released=0, requeued=0)
    assert store.jobs.get(submission.job_id).state is JobState.EXPIRED


def test_a_new_sweeper_waits_a_whole_period(store: Store, sweeper: Sweeper, clock: Clock) -> None:
    _, (ref,) = planned(store, 1)
    claim(store, ref, "silent")
    clock.now += 1_000_000
    assert sweeper.sweep().released == 0


def test_a_worker_that_never_beat_is_swept_too(
    store: Store, sweeper: Sweeper, clock: Clock
) -> None:
    _, (ref,) = planned(store, 1)
    assert store.leases.claim(ref.id, 0, "never beat") is not None
    sweeper.sweep()
    assert watch(sweeper, clock, 10).released == 1


def test_a_request_whose_workers_die_three_times_while_it_is_alone_is_dead(
    store: Store, sweeper: Sweeper, clock: Clock
) -> None:
    job_id, (ref, neighbour) = planned(store, 2)
    compute(store, neighbour)
    for times in range(4):
        assert store.jobs.get(job_id).is_over is False
        claim(store, ref, f"worker-{times}")
        sweeper.sweep()
        assert watch(sweeper, clock, 10).released == 1
        (ref, *_) = store.planning.dispatchable(10) or [ref]
    failed, done = store.results.read(job_id)
    assert done.error is None
    assert failed.error is not None
    assert failed.error.message.endswith("the last time the worker worker-3 died")


def test_time_in_which_nobody_looked_is_no_silence(
    store: Store, sweeper: Sweeper, clock: Clock
) -> None:
    """The database was away: when it is back, the workers get their time to be heard."""
    _, (ref,) = planned(store, 1)
    claim(store, ref, "worker")
    sweeper.sweep()
    clock.now += 3_600
    assert sweeper.sweep().released == 0
    assert watch(sweeper, clock, 5.9).released == 0
    assert watch(sweeper, clock, 0.1).released == 1


def test_time_in_which_the_database_took_no_writes_is_no_silence(
    sqlite_url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of SQLite see a locked database go on: only a write tells that nobody can beat."""
    monkeypatch.setattr("nightjar.jobs.store.database.BUSY_TIMEOUT_MS", 100)
    store = Store(sqlite_url)
    store.migrate()
    sweeper = Sweeper(
        store,
        dead_after_s=10,
        redispatch_after_s=60,
        longest_gap_s=4,
        deaths_allowed=3,
        clock=clock,
    )
    _, (ref,) = planned(store, 1)
    claim(store, ref, "worker")
    sweeper.sweep()
    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as other:
        other.execute("BEGIN IMMEDIATE")
        for _ in range(3):
            clock.now += 60
            with pytest.raises(StoreUnavailableError, match="locked"):
                sweeper.sweep()
    assert watch(sweeper, clock, 6).released == 0
    assert watch(sweeper, clock, 4).released == 1
    store.close()


def test_a_message_that_nobody_claims_is_ready_again_once_a_period(
    store: Store, sweeper: Sweeper, clock: Clock
) -> None:
    _, refs = planned(store, 2)
    store.planning.mark_dispatched(refs)
    sweeper.sweep()
    assert watch(sweeper, clock, 59).requeued == 0
    compute(store, refs[1])
    assert watch(sweeper, clock, 1) == SweepReport(released=0, requeued=1)
    assert store.planning.dispatchable(10) == [refs[0]]
    store.planning.mark_dispatched([refs[0]])
    assert watch(sweeper, clock, 60).requeued == 0
    assert watch(sweeper, clock, 2).requeued == 1


def test_a_worker_that_the_kernel_knows_to_be_gone_is_not_waited_for(
    store: Store, sweeper: Sweeper
) -> None:
    *place, began = owner_name().split(":")
    gone = ":".join([*place, str(int(began) - 1)])  # this process's id, before this process
    _, (first, second) = planned(store, 2)
    claim(store, first, gone)
    claim(store, second, owner_name())
    assert sweeper.sweep() == SweepReport(released=1, requeued=0)
    assert [ref.isolated for ref in store.planning.dispatchable(10)] == [True]


def test_leases_come_back_before_anything_is_ended(
    store: Store, clock: Clock, sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (held,) = planned(store, 1)
    claim(store, held, "silent")
    sweeper.sweep()

    def fails(patience_s: float) -> int:
        raise StoreUnavailableError("a job of millions that ends")

    monkeypatch.setattr(store.stopping, "finish", fails)
    clock.now += 4
    for _ in range(2):
        clock.now += 4
        with pytest.raises(StoreUnavailableError):
            sweeper.sweep()
    assert store.leases.held_by("silent") == [held]
    clock.now += 4
    with pytest.raises(StoreUnavailableError):
        sweeper.sweep()
    assert store.leases.held_by("silent") == []


def test_messages_that_the_broker_still_holds_are_not_sent_again(
    store: Store, clock: Clock
) -> None:
    _, refs = planned(store, 3)
    store.planning.mark_dispatched(refs)
    asked: list[int] = []

    def find_lost(
        unclaimed: Sequence[MicroBatchRef], overdue: Sequence[MicroBatchRef]
    ) -> Sequence[MicroBatchRef]:
        asked.append(len(unclaimed))
        return overdue[:1]

    with_broker = Sweeper(
        store,
        dead_after_s=10,
        redispatch_after_s=20,
        longest_gap_s=4,
        deaths_allowed=3,
        find_lost=find_lost,
        clock=clock,
    )
    assert watch(with_broker, clock, 20).requeued == 0
    assert asked == []
    assert watch(with_broker, clock, 2).requeued == 1
    assert asked == [3]
    assert [ref.id for ref in store.planning.dispatched()] == [ref.id for ref in refs[1:]]


def test_jobs_whose_time_is_over_are_purged_after_everything_else(store: Store) -> None:
    """And in the time that is left of a sweep: the next one goes on."""
    large, small = (finished_job(store, rows, days=9) for rows in (4 * ROWS_PER_STEP, 100))
    young = finished_job(store, 100, days=6)
    planned(store, 1)

    def sweeper(days: float | None) -> Sweeper:
        keep_s = None if days is None else days * 86_400
        limits = {"dead_after_s": 10, "redispatch_after_s": 60, "longest_gap_s": 4}
        return Sweeper(store, deaths_allowed=3, keep_results_s=keep_s, **limits)

    sweeper(None).sweep()
    assert store.jobs.get(large).purged_at is None
    weekly = sweeper(7)
    weekly.sweep(0.0)
    assert store.jobs.get(large).purged_at is not None
    assert store.jobs.get(small).purged_at is None  # one after another
    assert results_kept(store, large) == 3 * ROWS_PER_STEP
    weekly.sweep()
    assert store.jobs.get(small).purged_at is not None
    assert [results_kept(store, one) for one in (large, small)] == [0, 0]
    assert store.jobs.get(young).purged_at is None


def test_a_sweep_frees_deleted_files(store: Store, sweeper: Sweeper) -> None:
    file_id = store.files.begin(NewFile("us", "in.jsonl"))
    store.files.append(file_id, 0, b"line")
    store.files.end(file_id, 4, hashlib.sha256(b"line").hexdigest(), None)
    store.files.delete(file_id, "us")
    sweeper.sweep(1.0)
    with store.database.reading() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(file_part)) == 0

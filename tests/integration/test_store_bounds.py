"""Transactions are bounded by the rows that change: requests that follow others count."""

from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import EncodedRequest, MicroBatchRef, NewJob, NewMicroBatch, NewRequest
from nightjar.jobs.states import JobState, RequestKind
from nightjar.jobs.store import Store, stopping
from nightjar.jobs.store.following import FOLLOWERS_PER_STEP, MOST_EQUAL
from nightjar.jobs.store.leases import Leases
from nightjar.jobs.store.outcomes import Outcomes
from nightjar.jobs.store.stopping import REQUESTS_PER_STEP
from tests.jobs import planned
from tests.outcomes import answers, claim

pytestmark = pytest.mark.one_database

LEADERS = 6
ROWS = LEADERS * MOST_EQUAL  # all equal
MOST_ROWS = REQUESTS_PER_STEP + FOLLOWERS_PER_STEP


def equal_rows(store: Store, rows: int, **of_job: float) -> str:
    body = validate_body(RequestKind.GENERATE, {"prompt": "a", "max_tokens": 4, "temperature": 0})
    with store.jobs.submit(NewJob("tiny", **of_job)) as submission:  # type: ignore[arg-type]
        submission.add(
            NewRequest(n, n + 1, f"row-{n}", RequestKind.GENERATE, body) for n in range(rows)
        )
    return submission.job_id


def plan(store: Store, job_id: str) -> MicroBatchRef:
    ids = [request.id for request in store.backlog.queued_requests(job_id, ROWS)]
    assert len(ids) == LEADERS
    encoded = [EncodedRequest(id_, [[1]]) for id_ in ids]
    (ref,) = store.planning.save_plan(
        job_id, encoded, [NewMicroBatch(RequestKind.GENERATE, 32, ids, len(ids))]
    )
    return ref


@pytest.fixture
def landed(store: Store) -> Iterator[list[int]]:
    """How many results each transaction has landed."""
    sizes: list[int] = []

    def count(connection: sa.Connection) -> None:
        now = connection.scalar(sa.text("SELECT count(*) FROM result")) or 0
        if now > sum(sizes):
            sizes.append(now - sum(sizes))

    engine = store.database.engine
    sa.event.listen(engine, "commit", count)
    yield sizes
    sa.event.remove(engine, "commit", count)


def cancel(store: Store, job_id: str) -> None:
    store.stopping.cancel(job_id)


def test_as_many_micro_batches_are_cancelled_at_once_as_fit_into_a_step(
    store: Store, landed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "REQUESTS_PER_STEP", 4)
    job_id, _ = planned(store, 10, each=2)
    cancel(store, job_id)
    assert landed == [4, 4, 2]


def finish(store: Store, job_id: str) -> None:
    ref = plan(store, job_id)
    claimed = claim(store, ref)
    assert store.leases.finish(ref.id, ref.epoch, "worker", answers(claimed))


def end_while_leased(store: Store, job_id: str) -> None:
    ref = plan(store, job_id)
    claim(store, ref)
    store.stopping.cancel(job_id)
    assert store.leases.give_back(ref.id, ref.epoch, "worker")


ENDS = {
    "cancel": (cancel, JobState.CANCELLED),
    "cancel what is planned": (
        lambda store, job: (plan(store, job), cancel(store, job)),
        "cancelled",
    ),
    "finish": (finish, JobState.COMPLETED),
    "give back what is cancelled": (end_while_leased, JobState.CANCELLED),
}


@pytest.mark.parametrize("how", ENDS)
def test_no_transaction_lands_more_rows_than_its_bound(
    store: Store, landed: list[int], how: str
) -> None:
    end: Callable[[Store, str], object]
    end, state = ENDS[how]
    job_id = equal_rows(store, ROWS)
    end(store, job_id)
    while store.stopping.finish() + store.orphans.land():
        pass
    assert store.jobs.get(job_id).state == state
    assert sum(landed) == ROWS
    assert max(landed) <= MOST_ROWS


def test_the_sweeper_lands_what_a_dead_worker_left(
    store: Store, landed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = equal_rows(store, ROWS)
    # It died right after the transaction of `finish`.
    outcomes = Outcomes(store.database)
    monkeypatch.setattr(outcomes, "write", store.database.write)
    monkeypatch.setattr(store, "leases", Leases(store.database, outcomes))
    finish(store, job_id)
    assert landed == [LEADERS + FOLLOWERS_PER_STEP]
    assert store.jobs.get(job_id).state is JobState.RUNNING
    assert store.orphans.land() == ROWS - sum(landed[:1])
    job = store.jobs.get(job_id)
    assert (job.state, job.completed, job.reused) == (JobState.COMPLETED, ROWS, ROWS - LEADERS)


def test_ending_stops_when_its_time_is_over_and_goes_on_later(
    store: Store, landed: list[int]
) -> None:
    big, small = (
        equal_rows(store, ROWS, completion_window_s=0),
        equal_rows(store, 10, completion_window_s=0),
    )
    assert sorted(store.stopping.expire()) == sorted([big, small])
    assert store.stopping.finish(patience_s=0) > 0
    assert len(landed) == 1
    assert store.jobs.get(big).state is JobState.CANCELLING
    assert store.stopping.finish() > 0
    assert [store.jobs.get(job).state for job in (big, small)] == [JobState.EXPIRED] * 2
    assert sum(landed) == ROWS + 10

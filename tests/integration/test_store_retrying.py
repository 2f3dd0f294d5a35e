"""Retrying by hand: which failures come back, how, and what the job becomes."""

from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
import sqlalchemy as sa

from nightjar.jobs.errors import LifecycleError, UnknownJobError
from nightjar.jobs.records import (
    EncodedRequest,
    NewJob,
    NewMicroBatch,
    NewRequest,
    NewResult,
    RequestError,
)
from nightjar.jobs.states import JobState, RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.retrying import REQUESTS_PER_STEP
from nightjar.jobs.store.tables import job as job_table
from nightjar.jobs.workers import Crash
from tests.jobs import planned, submit
from tests.outcomes import answers, claim, codes, compute

pytestmark = pytest.mark.one_database

CRASH = Crash("the compute process was ended by SIGSEGV", allowed=1)


def fail(store: Store, job_id: str, status: int, code: str = "internal_error") -> None:
    """Fail everything of the job that is ready."""
    for ref in store.planning.dispatchable(100):
        claimed = claim(store, ref)
        assert claimed.job_id == job_id
        results = [
            NewResult.failure(request.id, code, "it failed", status=status)
            for request in claimed.requests
        ]
        assert store.leases.finish(claimed.id, claimed.epoch, "worker", results)


def kill(store: Store) -> None:
    """Crash everything that is ready until all of it is dead."""
    while refs := store.planning.dispatchable(100):
        claimed = claim(store, refs[0])
        assert store.suspects.add(claimed.id, claimed.epoch, "worker", CRASH)


def test_dead_requests_are_computed_alone_and_counted_anew(store: Store) -> None:
    job_id, refs = planned(store, 4, each=2)
    compute(store, refs[0])
    kill(store)
    assert store.jobs.get(job_id).state is JobState.COMPLETED_WITH_FAILURES
    assert store.retries.retry(job_id) == 2
    job = store.jobs.get(job_id)
    assert (job.state, job.failed, job.is_over) == (JobState.RUNNING, 0, False)
    assert [result.index for result in store.results.read(job_id)] == [0, 1]
    alone = store.planning.dispatchable(9)
    assert [(ref.size, ref.isolated, ref.tokens) for ref in alone] == [(1, True, 7)] * 2
    for ref in alone:
        assert claim(store, ref).crashes == 0
        assert store.leases.give_back(ref.id, 0, "worker")
    for ref in store.planning.dispatchable(9):
        assert compute(store, ref)
    assert store.jobs.get(job_id).state is JobState.COMPLETED
    assert codes(store.results.read(job_id)) == [None] * 4


def test_other_failures_of_ours_are_planned_again(store: Store) -> None:
    job_id, _ = planned(store, 2, each=2)
    fail(store, job_id, 500)
    assert store.jobs.get(job_id).state is JobState.FAILED
    assert store.retries.retry(job_id) == 2
    assert store.backlog.jobs_to_plan() == [job_id]
    assert len(store.backlog.queued_requests(job_id, 9)) == 2
    assert store.planning.dispatchable(9) == []


def test_the_requests_own_faults_stay(store: Store) -> None:
    job_id, _ = planned(store, 2)
    fail(store, job_id, 400, "context_exceeded")
    assert store.retries.retry(job_id) == 0
    assert store.jobs.get(job_id).state is JobState.FAILED
    assert codes(store.results.read(job_id)) == ["context_exceeded"] * 2


def test_a_job_that_nobody_began_is_queued_again(store: Store) -> None:
    job_id = submit(store, [{"prompt": "a"}])
    (request,) = store.backlog.queued_requests(job_id, 1)
    store.planning.save_plan(
        job_id, [], [], [(request.id, RequestError("internal_error", "it failed"))]
    )
    assert store.jobs.get(job_id).state is JobState.FAILED
    assert store.retries.retry(job_id) == 1
    assert store.jobs.get(job_id).state is JobState.QUEUED


def test_failures_of_a_job_that_runs_or_is_paused(store: Store) -> None:
    job_id, refs = planned(store, 3)
    claimed = claim(store, refs[0])
    assert store.leases.fail(claimed.id, 0, "worker", RequestError("internal_error", "x"))
    assert store.stopping.pause(job_id).state is JobState.PAUSED
    assert store.retries.retry(job_id) == 1
    job = store.jobs.get(job_id)
    assert (job.state, job.failed) == (JobState.PAUSED, 0)


def test_a_stopped_job_is_left_alone(store: Store) -> None:
    job_id, refs = planned(store, 2)
    claimed = claim(store, refs[0])
    assert store.leases.fail(claimed.id, 0, "worker", RequestError("internal_error", "x"))
    store.stopping.cancel(job_id)
    with pytest.raises(LifecycleError, match="is cancelled: nothing of it can be retried"):
        store.retries.retry(job_id)
    assert codes(store.results.read(job_id)) == ["internal_error", "cancelled"]


def test_an_unknown_job(store: Store) -> None:
    with pytest.raises(UnknownJobError):
        store.retries.retry("job_nothing")


def test_retrying_twice_and_after_success_changes_nothing(store: Store) -> None:
    job_id, _ = planned(store, 1)
    fail(store, job_id, 503)
    assert store.retries.retry(job_id) == 1
    assert store.retries.retry(job_id) == 0
    assert store.jobs.get(job_id).failed == 0


def test_many_failures_are_retried_in_steps(store: Store) -> None:
    job_id, _ = planned(store, 2_100, each=700)
    fail(store, job_id, 500)
    step = partial(store.retries.take_back, job_id=job_id, after=-1)
    assert len(store.database.write(step)) == REQUESTS_PER_STEP
    assert store.retries.retry(job_id) == 2_100 - REQUESTS_PER_STEP
    assert len(store.backlog.queued_requests(job_id, 9_999)) == 2_100


def test_a_retry_that_a_cancellation_overtakes_leaves_no_trace(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, refs = planned(store, 2)
    claimed = claim(store, refs[0])
    assert store.leases.fail(claimed.id, 0, "worker", RequestError("internal_error", "x"))
    looked = store.jobs.get(job_id)
    store.stopping.cancel(job_id)
    monkeypatch.setattr("nightjar.jobs.store.retrying.find_job", lambda connection, job_id: looked)
    with pytest.raises(LifecycleError, match="was stopped"):
        store.retries.retry(job_id)
    assert codes(store.results.read(job_id)) == ["internal_error", "cancelled"]


def test_answers_of_a_retried_request_land_like_any(store: Store) -> None:
    job_id, (ref,) = planned(store, 1)
    claimed = claim(store, ref)
    assert store.suspects.add(ref.id, 0, "worker", CRASH)
    kill(store)
    store.retries.retry(job_id)
    (alone,) = store.planning.dispatchable(1)
    again = claim(store, alone)
    assert again.requests[0].segments == claimed.requests[0].segments
    assert store.leases.finish(alone.id, 0, "worker", answers(again))
    assert store.jobs.get(job_id).completed == 1


@pytest.mark.parametrize("written", [True, False])
def test_a_retry_after_the_deadline_begins_the_window_anew(store: Store, written: bool) -> None:
    """The next sweep would end the job otherwise, and its errors would be gone."""
    rows = [NewRequest(0, 1, "a", RequestKind.GENERATE, {"prompt": "a"})]
    with store.jobs.submit(NewJob("tiny", completion_window_s=60.0)) as submission:
        submission.add(rows)
    job_id = submission.job_id
    (queued,) = store.backlog.queued_requests(job_id, 1)
    plan = [NewMicroBatch(RequestKind.GENERATE, 32, [queued.id], 3)]
    store.planning.save_plan(job_id, [EncodedRequest(queued.id, [[1]])], plan, [])
    fail(store, job_id, 500)
    past = datetime.now(UTC) - timedelta(hours=1)
    values: dict[str, object] = {"created_at": past, "expires_at": past + timedelta(seconds=60)}
    if not written:  # a job of the version before
        values["completion_window_s"] = None
    with store.database.engine.begin() as connection:
        connection.execute(sa.update(job_table).values(values))
    for _ in range(2):  # the window is as long the second time
        assert store.retries.retry(job_id) == 1
        expires_at = store.jobs.get(job_id).expires_at
        assert expires_at is not None
        assert 50 < (expires_at - datetime.now(UTC)).total_seconds() <= 60
        assert store.stopping.expire() == []
        (again,) = store.backlog.queued_requests(job_id, 1)
        store.planning.save_plan(job_id, [EncodedRequest(again.id, [[1]])], plan, [])
        fail(store, job_id, 500)
    assert codes(store.results.read(job_id)) == ["internal_error"]


def test_a_retry_keeps_the_deadline_of_a_job_that_runs(store: Store) -> None:
    rows = [NewRequest(n, n + 1, f"r{n}", RequestKind.GENERATE, {"prompt": "a"}) for n in (0, 1)]
    with store.jobs.submit(NewJob("tiny", completion_window_s=60.0)) as submission:
        submission.add(rows)
    queued = store.backlog.queued_requests(submission.job_id, 2)
    encoded = [EncodedRequest(item.id, [[1]]) for item in queued]
    plan = [NewMicroBatch(RequestKind.GENERATE, 32, [item.id], 3) for item in queued]
    first, _ = store.planning.save_plan(submission.job_id, encoded, plan, [])
    claimed = claim(store, first)
    failure = NewResult.failure(claimed.requests[0].id, "x", "ours", status=500)
    assert store.leases.finish(first.id, 0, "worker", [failure])
    before = store.jobs.get(submission.job_id).expires_at
    assert store.retries.retry(submission.job_id) == 1
    assert store.jobs.get(submission.job_id).expires_at == before

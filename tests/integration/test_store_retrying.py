"""Retrying by hand: which failures come back, how, and what the job becomes."""

import pytest

from nightjar.jobs.errors import LifecycleError, UnknownJobError
from nightjar.jobs.records import Crash, JobState, NewResult, RequestError
from nightjar.jobs.store import Store
from tests.jobs import planned, submit
from tests.outcomes import answers, claim, codes, compute

CRASH = Crash("the compute process was ended by SIGSEGV", allowed=1)


def fail(store: Store, job_id: str, status: int, code: str = "internal_error") -> None:
    """Fail everything of the job that is ready."""
    for ref in store.dispatchable(100):
        claimed = claim(store, ref)
        assert claimed.job_id == job_id
        results = [
            NewResult.failure(request.id, code, "it failed", status=status)
            for request in claimed.requests
        ]
        assert store.finish(claimed.id, claimed.epoch, "worker", results)


def kill(store: Store) -> None:
    """Crash everything that is ready until all of it is dead."""
    while refs := store.dispatchable(100):
        claimed = claim(store, refs[0])
        assert store.suspect(claimed.id, claimed.epoch, "worker", CRASH)


def test_dead_requests_are_computed_alone_and_counted_anew(store: Store) -> None:
    job_id, refs = planned(store, 4, each=2)
    compute(store, refs[0])
    kill(store)
    assert store.job(job_id).state is JobState.COMPLETED_WITH_FAILURES
    assert store.retry(job_id) == 2
    job = store.job(job_id)
    assert (job.state, job.failed, job.is_over) == (JobState.RUNNING, 0, False)
    assert [result.index for result in store.results(job_id)] == [0, 1]
    alone = store.dispatchable(9)
    assert [(ref.size, ref.isolated, ref.tokens) for ref in alone] == [(1, True, 7)] * 2
    for ref in alone:
        assert claim(store, ref).crashes == 0
        assert store.give_back(ref.id, 0, "worker")
    for ref in store.dispatchable(9):
        assert compute(store, ref)
    assert store.job(job_id).state is JobState.COMPLETED
    assert codes(store.results(job_id)) == [None] * 4


def test_other_failures_of_ours_are_planned_again(store: Store) -> None:
    job_id, _ = planned(store, 2, each=2)
    fail(store, job_id, 500)
    assert store.job(job_id).state is JobState.FAILED
    assert store.retry(job_id) == 2
    assert store.jobs_to_plan() == [job_id]
    assert len(store.queued_requests(job_id, 9)) == 2
    assert store.dispatchable(9) == []


def test_the_requests_own_faults_stay(store: Store) -> None:
    job_id, _ = planned(store, 2)
    fail(store, job_id, 400, "context_exceeded")
    assert store.retry(job_id) == 0
    assert store.job(job_id).state is JobState.FAILED
    assert codes(store.results(job_id)) == ["context_exceeded"] * 2


def test_a_job_that_nobody_began_is_queued_again(store: Store) -> None:
    job_id = submit(store, [{"prompt": "a"}])
    (request,) = store.queued_requests(job_id, 1)
    store.save_plan(job_id, [], [], [(request.id, RequestError("internal_error", "it failed"))])
    assert store.job(job_id).state is JobState.FAILED
    assert store.retry(job_id) == 1
    assert store.job(job_id).state is JobState.QUEUED


def test_failures_of_a_job_that_runs_or_is_paused(store: Store) -> None:
    job_id, refs = planned(store, 3)
    claimed = claim(store, refs[0])
    assert store.fail_micro_batch(claimed.id, 0, "worker", RequestError("internal_error", "x"))
    assert store.pause(job_id).state is JobState.PAUSED
    assert store.retry(job_id) == 1
    job = store.job(job_id)
    assert (job.state, job.failed) == (JobState.PAUSED, 0)


def test_a_stopped_job_is_left_alone(store: Store) -> None:
    job_id, refs = planned(store, 2)
    claimed = claim(store, refs[0])
    assert store.fail_micro_batch(claimed.id, 0, "worker", RequestError("internal_error", "x"))
    store.cancel(job_id)
    with pytest.raises(LifecycleError, match="is cancelled: nothing of it can be retried"):
        store.retry(job_id)
    assert codes(store.results(job_id)) == ["internal_error", "cancelled"]


def test_an_unknown_job(store: Store) -> None:
    with pytest.raises(UnknownJobError):
        store.retry("job_nothing")


def test_retrying_twice_and_after_success_changes_nothing(store: Store) -> None:
    job_id, _ = planned(store, 1)
    fail(store, job_id, 503)
    assert store.retry(job_id) == 1
    assert store.retry(job_id) == 0
    assert store.job(job_id).failed == 0


def test_many_failures_are_retried_in_steps(store: Store) -> None:
    job_id, _ = planned(store, 2_100, each=700)
    fail(store, job_id, 500)
    assert store.retry(job_id) == 2_100
    assert len(store.queued_requests(job_id, 9_999)) == 2_100


def test_a_retry_that_a_cancellation_overtakes_leaves_no_trace(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, refs = planned(store, 2)
    claimed = claim(store, refs[0])
    assert store.fail_micro_batch(claimed.id, 0, "worker", RequestError("internal_error", "x"))
    looked = store.job(job_id)
    store.cancel(job_id)
    monkeypatch.setattr("nightjar.jobs.store.retrying.find_job", lambda connection, job_id: looked)
    with pytest.raises(LifecycleError, match="was stopped"):
        store.retry(job_id)
    assert codes(store.results(job_id)) == ["internal_error", "cancelled"]


def test_answers_of_a_retried_request_land_like_any(store: Store) -> None:
    job_id, (ref,) = planned(store, 1)
    claimed = claim(store, ref)
    assert store.suspect(ref.id, 0, "worker", CRASH)
    kill(store)
    store.retry(job_id)
    (alone,) = store.dispatchable(1)
    again = claim(store, alone)
    assert again.requests[0].segments == claimed.requests[0].segments
    assert store.finish(alone.id, 0, "worker", answers(again))
    assert store.job(job_id).completed == 1

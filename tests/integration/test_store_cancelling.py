"""Cancelling: what waits ends now, what is leased keeps what it landed."""

import pytest

from nightjar.jobs.errors import UnknownJobError
from nightjar.jobs.records import (
    EncodedRequest,
    JobState,
    MicroBatchState,
    NewMicroBatch,
    RequestKind,
)
from nightjar.jobs.store import Store
from tests.jobs import planned, submit
from tests.outcomes import answers, claim, codes, compute


def test_a_queued_job_is_cancelled_at_once(store: Store) -> None:
    job_id = submit(store, [{"prompt": "a"}] * 3)
    job = store.cancel(job_id)
    assert (job.state, job.cancelled, job.cancel_requested) == (JobState.CANCELLED, 3, True)
    assert job.finished_at is not None
    assert codes(store.results(job_id)) == ["cancelled"] * 3
    assert codes(store.results(job_id, outcome="failed")) == ["cancelled"] * 3
    assert store.jobs_to_plan() == []
    assert store.is_cancelled(job_id)


def test_ready_and_dispatched_micro_batches_are_cancelled(store: Store) -> None:
    job_id, refs = planned(store, 4, each=2)
    store.mark_dispatched(refs[:1])
    assert store.cancel(job_id).state is JobState.CANCELLED
    assert store.claim(refs[0].id, 0, "worker") is None
    assert store.dispatchable(9) == []
    assert store.count_micro_batches(job_id)[MicroBatchState.CANCELLED] == 2


def test_what_is_leased_keeps_its_output(store: Store) -> None:
    job_id, refs = planned(store, 4, each=2)
    compute(store, refs[0])
    claimed = claim(store, refs[1])
    job = store.cancel(job_id)
    assert (job.state, job.completed, job.cancelled) == (JobState.CANCELLING, 2, 0)
    assert store.finish(claimed.id, 0, "worker", answers(claimed)[:1])
    job = store.job(job_id)
    assert (job.state, job.completed, job.cancelled) == (JobState.CANCELLED, 3, 1)
    assert codes(store.results(job_id)) == [None, None, None, "cancelled"]


@pytest.mark.parametrize("how", ["give_back", "release"])
def test_a_lease_that_comes_back_is_cancelled(store: Store, how: str) -> None:
    job_id, (ref,) = planned(store, 2, each=2)
    claim(store, ref)
    assert store.cancel(job_id).state is JobState.CANCELLING
    if how == "give_back":
        assert store.give_back(ref.id, 0, "worker")
    else:
        assert store.release_owner("worker") == 1
    assert store.job(job_id).state is JobState.CANCELLED
    assert store.dispatchable(9) == []


def test_cancelling_again_and_cancelling_what_is_over(store: Store) -> None:
    job_id, (ref,) = planned(store, 1)
    claim(store, ref)
    assert store.cancel(job_id).state is JobState.CANCELLING
    assert store.cancel(job_id).state is JobState.CANCELLING
    done, (other,) = planned(store, 1)
    compute(store, other)
    job = store.cancel(done)
    assert (job.state, job.cancel_requested) == (JobState.COMPLETED, False)


def test_an_unknown_job(store: Store) -> None:
    with pytest.raises(UnknownJobError, match="job_nothing"):
        store.cancel("job_nothing")
    assert not store.is_cancelled("job_nothing")


def test_a_plan_for_a_cancelled_job_is_not_stored(store: Store) -> None:
    _, (ref,) = planned(store, 1)
    claim(store, ref)
    late = submit(store, [{"prompt": "a"}])
    (request,) = store.queued_requests(late, 1)
    store.cancel(late)
    plan = [NewMicroBatch(RequestKind.GENERATE, 32, [request.id], 3)]
    assert store.save_plan(late, [EncodedRequest(request.id, [[1]])], plan, []) == []


def cancel_without_its_second_half(store: Store, job_id: str) -> None:
    """What a canceller leaves that dies after the flag is set."""
    store._cancel_what_waits = lambda job_id: 0  # type: ignore[method-assign]
    try:
        assert store.cancel(job_id).state is JobState.CANCELLING
    finally:
        del store._cancel_what_waits


def test_a_claim_of_a_cancelled_job_ends_its_requests(store: Store) -> None:
    job_id, (ref,) = planned(store, 2, each=2)
    cancel_without_its_second_half(store, job_id)
    assert store.claim(ref.id, 0, "worker") is None
    job = store.job(job_id)
    assert (job.state, job.cancelled) == (JobState.CANCELLED, 2)


def test_the_sweeper_ends_what_a_dead_canceller_left(store: Store) -> None:
    job_id = submit(store, [{"prompt": "a"}] * 3)
    cancel_without_its_second_half(store, job_id)
    assert store.jobs_to_plan() == []
    assert store.finish_cancellations() == 3
    assert store.finish_cancellations() == 0
    assert store.job(job_id).state is JobState.CANCELLED


def test_a_large_job_is_cancelled_in_steps(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightjar.jobs.store.cancelling.REQUESTS_PER_STEP", 10)
    monkeypatch.setattr("nightjar.jobs.store.cancelling.MICRO_BATCHES_PER_STEP", 2)
    job_id, _ = planned(store, 5)
    queued = submit(store, [{"prompt": "a"}] * 25)
    assert store.cancel(job_id).cancelled == 5
    assert store.cancel(queued).cancelled == 25

"""Pausing, cancelling, expiring: what waits ends now, what is leased keeps what it landed."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from nightjar.jobs.errors import UnknownJobError
from nightjar.jobs.records import (
    EncodedRequest,
    Job,
    MicroBatchRef,
    NewJob,
    NewMicroBatch,
    NewRequest,
)
from nightjar.jobs.states import JobState, MicroBatchState, RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.stopping import Stopping
from nightjar.jobs.store.tables import job as job_table
from tests.jobs import before_the_next_write, planned, submit
from tests.outcomes import answers, claim, codes, compute

pytestmark = pytest.mark.one_database


def test_a_queued_job_is_cancelled_at_once(store: Store) -> None:
    job_id = submit(store, [{"prompt": "a"}] * 3)
    job = store.stopping.cancel(job_id)
    assert (job.state, job.cancelled, job.cancel_requested) == (JobState.CANCELLED, 3, True)
    assert job.finished_at is not None
    assert codes(store.results.read(job_id)) == ["cancelled"] * 3
    assert codes(store.results.read(job_id, outcome="failed")) == ["cancelled"] * 3
    assert store.backlog.jobs_to_plan() == []
    assert store.jobs.is_stopped(job_id)


def test_ready_and_dispatched_micro_batches_are_cancelled(store: Store) -> None:
    job_id, refs = planned(store, 4, each=2)
    store.planning.mark_dispatched(refs[:1])
    assert store.stopping.cancel(job_id).state is JobState.CANCELLED
    assert store.leases.claim(refs[0].id, 0, "worker") is None
    assert store.planning.dispatchable(9) == []
    assert store.jobs.get_in_detail(job_id)[1][MicroBatchState.CANCELLED] == 2


def test_what_is_leased_keeps_its_output(store: Store) -> None:
    job_id, refs = planned(store, 4, each=2)
    compute(store, refs[0])
    claimed = claim(store, refs[1])
    job = store.stopping.cancel(job_id)
    assert (job.state, job.completed, job.cancelled) == (JobState.CANCELLING, 2, 0)
    assert store.leases.finish(claimed.id, 0, "worker", answers(claimed)[:1])
    job = store.jobs.get(job_id)
    assert (job.state, job.completed, job.cancelled) == (JobState.CANCELLED, 3, 1)
    assert codes(store.results.read(job_id)) == [None, None, None, "cancelled"]


@pytest.mark.parametrize("how", ["give_back", "release"])
def test_a_lease_that_comes_back_is_cancelled(store: Store, how: str) -> None:
    job_id, (ref,) = planned(store, 2, each=2)
    claim(store, ref)
    assert store.stopping.cancel(job_id).state is JobState.CANCELLING
    if how == "give_back":
        assert store.leases.give_back(ref.id, 0, "worker")
    else:
        assert store.leases.give_back_all("worker") == 1
    assert store.jobs.get(job_id).state is JobState.CANCELLED
    assert store.planning.dispatchable(9) == []


def test_cancelling_again_and_cancelling_what_is_over(store: Store) -> None:
    job_id, (ref,) = planned(store, 1)
    claim(store, ref)
    assert store.stopping.cancel(job_id).state is JobState.CANCELLING
    assert store.stopping.cancel(job_id).state is JobState.CANCELLING
    done, (other,) = planned(store, 1)
    compute(store, other)
    job = store.stopping.cancel(done)
    assert (job.state, job.cancel_requested) == (JobState.COMPLETED, False)


def test_an_unknown_job(store: Store) -> None:
    with pytest.raises(UnknownJobError, match="job_nothing"):
        store.stopping.cancel("job_nothing")
    assert not store.jobs.is_stopped("job_nothing")


def test_a_plan_for_a_cancelled_job_is_not_stored(store: Store) -> None:
    _, (ref,) = planned(store, 1)
    claim(store, ref)
    late = submit(store, [{"prompt": "a"}])
    (request,) = store.backlog.queued_requests(late, 1)
    store.stopping.cancel(late)
    plan = [NewMicroBatch(RequestKind.GENERATE, 32, [request.id], 3)]
    assert store.planning.save_plan(late, [EncodedRequest(request.id, [[1]])], plan, []) == []


def cancel_without_its_second_half(store: Store, job_id: str) -> None:
    """What a process leaves that dies after it has requested the cancel."""
    assert store.stopping.request_cancel(job_id).state is JobState.CANCELLING


def test_a_plan_that_comes_while_a_job_is_cancelled_is_not_stored(store: Store) -> None:
    """Its requests are still queued: a cancel of millions ends them in steps."""
    job_id = submit(store, [{"prompt": "a"}])
    (request,) = store.backlog.queued_requests(job_id, 1)
    cancel_without_its_second_half(store, job_id)
    plan = [NewMicroBatch(RequestKind.GENERATE, 32, [request.id], 3)]
    assert store.planning.save_plan(job_id, [EncodedRequest(request.id, [[1]])], plan, []) == []
    assert store.stopping.finish() == 1
    assert store.jobs.get(job_id).state is JobState.CANCELLED


def test_a_claim_of_a_cancelled_job_ends_its_requests(store: Store) -> None:
    job_id, (ref,) = planned(store, 2, each=2)
    cancel_without_its_second_half(store, job_id)
    assert store.leases.claim(ref.id, 0, "worker") is None
    job = store.jobs.get(job_id)
    assert (job.state, job.cancelled) == (JobState.CANCELLED, 2)


def test_the_sweeper_ends_what_a_dead_canceller_left(store: Store) -> None:
    job_id = submit(store, [{"prompt": "a"}] * 3)
    cancel_without_its_second_half(store, job_id)
    assert store.backlog.jobs_to_plan() == []
    assert store.stopping.finish() == 3
    assert store.stopping.finish() == 0
    assert store.jobs.get(job_id).state is JobState.CANCELLED


def test_a_large_job_is_cancelled_in_steps(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nightjar.jobs.store.stopping.REQUESTS_PER_STEP", 10)
    monkeypatch.setattr("nightjar.jobs.store.stopping.MICRO_BATCHES_PER_STEP", 2)
    job_id, _ = planned(store, 5)
    queued = submit(store, [{"prompt": "a"}] * 25)
    assert store.stopping.cancel(job_id).cancelled == 5
    assert store.stopping.cancel(queued).cancelled == 25


def submit_until(store: Store, seconds: float, requests: int = 3) -> str:
    """A job with a deadline so many seconds from now."""
    rows = [
        NewRequest(n, n + 1, f"row-{n}", RequestKind.GENERATE, {"prompt": "a"})
        for n in range(requests)
    ]
    with store.jobs.submit(NewJob("tiny", completion_window_s=seconds)) as submission:
        submission.add(rows)
    return submission.job_id


def plan_all(store: Store, job_id: str) -> list[MicroBatchRef]:
    ids = [request.id for request in store.backlog.queued_requests(job_id, 99)]
    plan = [NewMicroBatch(RequestKind.GENERATE, 32, [id_], 3) for id_ in ids]
    return store.planning.save_plan(job_id, [EncodedRequest(id_, [[1]]) for id_ in ids], plan)


def let_pass(store: Store, *job_ids: str) -> None:
    """Move deadlines into the past, so that no test depends on how long its steps take."""
    move = sa.update(job_table).values(expires_at=datetime.now(UTC) - timedelta(seconds=1))
    move = move.where(job_table.c.id.in_(job_ids))
    store.database.write(lambda connection: connection.execute(move))


def test_a_deadline_keeps_the_finished_part(store: Store) -> None:
    job_id = submit_until(store, 3_600)
    first, leased, _ = plan_all(store, job_id)
    compute(store, first)
    claimed = claim(store, leased)
    assert store.stopping.expire() == []
    assert not store.jobs.is_stopped(job_id)
    let_pass(store, job_id)
    assert store.stopping.expire() == [job_id]
    assert store.stopping.expire() == []
    assert store.jobs.is_stopped(job_id)
    assert store.stopping.finish() == 1
    assert store.jobs.get(job_id).state is JobState.CANCELLING
    assert store.leases.finish(claimed.id, 0, "worker", answers(claimed))
    job = store.jobs.get(job_id)
    assert (job.state, job.completed, job.cancelled) == (JobState.EXPIRED, 2, 1)
    assert codes(store.results.read(job_id)) == [None, None, "expired"]
    assert store.results.read(job_id)[2].status_code == 504


def test_a_job_without_a_deadline_or_with_a_later_one_goes_on(store: Store) -> None:
    planned(store, 1)
    later = submit_until(store, 3_600)
    assert store.stopping.expire() == []
    job = store.jobs.get(later)
    assert job.expires_at is not None
    assert (job.expires_at - job.created_at).total_seconds() == pytest.approx(3_600)


def test_what_a_worker_holds_of_an_expired_job_expires_with_it(store: Store) -> None:
    job_id = submit_until(store, 0.01, requests=1)
    (ref,) = plan_all(store, job_id)
    claim(store, ref)
    time.sleep(0.01)
    assert store.stopping.expire() == [job_id]
    assert store.leases.give_back(ref.id, 0, "worker")
    assert store.jobs.get(job_id).state is JobState.EXPIRED
    assert codes(store.results.read(job_id)) == ["expired"]


def test_a_paused_job_expires_and_an_ended_one_does_not(store: Store) -> None:
    paused, ended = submit_until(store, 3_600), submit_until(store, 3_600, requests=1)
    store.stopping.pause(paused)
    (ref,) = plan_all(store, ended)
    compute(store, ref)
    let_pass(store, paused, ended)
    assert store.stopping.expire() == [paused]
    assert store.stopping.finish() == 3
    assert store.jobs.get(paused).state is JobState.EXPIRED
    assert store.jobs.get(ended).state is JobState.COMPLETED


def test_cancelling_an_expiring_job_leaves_it_expired(store: Store) -> None:
    job_id = submit_until(store, 0.01)
    time.sleep(0.01)
    store.stopping.expire()
    assert store.stopping.cancel(job_id).state is JobState.EXPIRED


def test_a_paused_job_is_neither_planned_nor_dispatched_nor_claimed(store: Store) -> None:
    waiting = submit(store, [{"prompt": "a"}])
    job_id, refs = planned(store, 3)
    running = claim(store, refs[0])
    store.planning.mark_dispatched(refs[1:2])
    assert store.stopping.pause(job_id).state is JobState.PAUSED
    assert store.stopping.pause(waiting).state is JobState.PAUSED
    assert store.backlog.jobs_to_plan() == []
    assert store.planning.dispatchable(9) == []
    assert store.leases.claim(refs[1].id, 0, "worker") is None
    assert store.leases.claim(refs[2].id, 0, "worker") is None
    assert store.leases.finish(running.id, 0, "worker", answers(running))
    assert store.jobs.get(job_id).completed == 1

    assert store.stopping.resume(job_id).state is JobState.RUNNING
    assert store.stopping.resume(waiting).state is JobState.QUEUED
    assert store.backlog.jobs_to_plan() == [waiting]
    assert store.planning.dispatchable(9) == refs[1:]
    for ref in refs[1:]:
        claimed = claim(store, ref)
        assert claimed.attempts == 1
        assert store.leases.finish(ref.id, 0, "worker", answers(claimed))
    assert store.jobs.get(job_id).state is JobState.COMPLETED


def test_a_paused_job_whose_last_lease_finishes_is_over(store: Store) -> None:
    job_id, (ref,) = planned(store, 1)
    claimed = claim(store, ref)
    store.stopping.pause(job_id)
    assert store.leases.finish(claimed.id, 0, "worker", answers(claimed))
    assert store.jobs.get(job_id).state is JobState.COMPLETED
    assert store.stopping.resume(job_id).state is JobState.COMPLETED
    assert store.stopping.pause(job_id).state is JobState.COMPLETED


def test_a_paused_job_can_be_cancelled(store: Store) -> None:
    job_id, _ = planned(store, 2)
    store.stopping.pause(job_id)
    assert store.stopping.cancel(job_id).state is JobState.CANCELLED
    assert codes(store.results.read(job_id)) == ["cancelled"] * 2


@pytest.mark.parametrize("act", [Stopping.pause, Stopping.resume])
def test_steering_an_unknown_job(store: Store, act: Callable[[Stopping, str], Job]) -> None:
    with pytest.raises(UnknownJobError):
        act(store.stopping, "job_nothing")


def test_a_job_that_ends_while_it_expires_has_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit_until(store, 0.01, requests=1)
    (ref,) = plan_all(store, job_id)
    claimed = claim(store, ref)
    time.sleep(0.01)
    results = answers(claimed)
    before_the_next_write(
        store, monkeypatch, lambda: store.leases.finish(ref.id, 0, "worker", results)
    )
    assert store.stopping.expire() == []
    job = store.jobs.get(job_id)
    assert (job.state, job.expired) == (JobState.COMPLETED, False)


def test_a_deadline_that_is_moved_while_a_job_expires_counts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit_until(store, 0.01)
    time.sleep(0.01)
    move = sa.update(job_table).values(expires_at=datetime.now(UTC) + timedelta(hours=1))
    database = store.database
    before_the_next_write(
        store, monkeypatch, lambda: database.write(lambda connection: connection.execute(move))
    )
    assert store.stopping.expire() == []
    assert store.jobs.get(job_id).state is JobState.QUEUED

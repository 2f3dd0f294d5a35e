"""Leases: one owner at a time, and results land once."""

import pytest
import sqlalchemy as sa

from nightjar.jobs.errors import StoreError
from nightjar.jobs.records import NewResult, RequestError
from nightjar.jobs.states import JobState, MicroBatchState
from nightjar.jobs.store import Store
from nightjar.jobs.store.tables import micro_batch
from nightjar.jobs.workers import ComputeSeconds, Crash, WorkerHeartbeat
from tests.jobs import planned
from tests.outcomes import answers, claim, codes, compute


def test_a_claim(store: Store) -> None:
    job_id, (ref,) = planned(store, 2, each=2)
    store.planning.mark_dispatched([ref])
    claimed = claim(store, ref)
    assert (claimed.id, claimed.epoch, claimed.job_id) == (ref.id, 0, job_id)
    assert (claimed.size, claimed.tokens, claimed.isolated) == (2, ref.tokens, False)
    assert (claimed.attempts, claimed.crashes) == (1, 0)
    assert [request.custom_id for request in claimed.requests] == ["row-0", "row-1"]
    job = store.jobs.get(job_id)
    assert job.state is JobState.RUNNING
    assert job.started_at is not None
    assert store.leases.claim(ref.id, ref.epoch, "other") is None


def test_unknown_and_stale_messages_claim_nothing(store: Store) -> None:
    _, (ref,) = planned(store, 1)
    assert store.leases.claim(ref.id + 1_000, 0, "worker") is None
    assert store.leases.claim(ref.id, ref.epoch + 1, "worker") is None
    assert store.planning.dispatchable(1) == [ref]


def test_finishing_lands_results_and_counts(store: Store) -> None:
    job_id, refs = planned(store, 4, each=2)
    assert all(compute(store, ref) for ref in refs)
    job = store.jobs.get(job_id)
    assert (job.state, job.completed, job.total, job.failed) == (JobState.COMPLETED, 4, 4, 0)
    assert (job.prompt_tokens, job.completion_tokens) == (12, 8)
    assert (job.requested_tokens, job.saved_tokens) == (16, 8)
    assert job.finished_at is not None
    results = store.results.read(job_id)
    assert [item.body for item in results] == [{"text": f"answer to row-{i}"} for i in range(4)]
    assert results[0].finish_reason == "stop"
    assert store.jobs.get_in_detail(job_id)[1][MicroBatchState.DONE] == 2


def test_finishing_twice_lands_once(store: Store) -> None:
    job_id, (ref,) = planned(store, 2, each=2)
    claimed = claim(store, ref)
    assert store.leases.finish(ref.id, 0, "worker", answers(claimed))
    assert not store.leases.finish(ref.id, 0, "worker", answers(claimed))
    assert store.jobs.get(job_id).completed == 2


def test_some_failures_make_it_completed_with_failures(store: Store) -> None:
    job_id, (ref,) = planned(store, 2, each=2)
    claimed = claim(store, ref)
    good, _ = answers(claimed)
    bad = NewResult.failure(claimed.requests[1].id, "nan", "the model gave NaN", status=500)
    assert store.leases.finish(ref.id, 0, "worker", [good, bad])
    job = store.jobs.get(job_id)
    assert (job.state, job.completed, job.failed) == (JobState.COMPLETED_WITH_FAILURES, 1, 1)
    assert codes(store.results.read(job_id)) == [None, "nan"]


def test_another_owner_and_an_old_epoch_cannot_finish(store: Store) -> None:
    job_id, (ref,) = planned(store, 1)
    claimed = claim(store, ref, "first")
    assert not store.leases.finish(ref.id, 0, "second", answers(claimed))
    assert store.leases.give_back(ref.id, 0, "first")
    again = store.leases.claim(ref.id, 1, "second")
    assert again is not None
    assert again.attempts == 2
    assert not store.leases.finish(ref.id, 0, "first", answers(claimed))
    assert store.results.read(job_id) == []
    assert store.leases.finish(ref.id, 1, "second", answers(again))
    assert store.jobs.get(job_id).completed == 1


def test_a_result_that_is_missing_or_foreign_lands_nothing(store: Store) -> None:
    job_id, (ref, other) = planned(store, 4, each=2)
    claimed = claim(store, ref)
    foreign = claim(store, other).requests[0].id
    results = answers(claimed)
    with pytest.raises(StoreError, match="lacks results"):
        store.leases.finish(ref.id, 0, "worker", results[:1])
    with pytest.raises(StoreError, match="no open requests"):
        store.leases.finish(ref.id, 0, "worker", [*results, NewResult.failure(foreign, "x", "y")])
    with pytest.raises(StoreError, match="written as JSON"):
        store.leases.finish(
            ref.id,
            0,
            "worker",
            [NewResult(r.request_id, 200, {"a": float("nan")}) for r in results],
        )
    assert store.results.read(job_id) == []
    assert store.leases.finish(ref.id, 0, "worker", results)


def test_giving_back_raises_the_epoch(store: Store) -> None:
    _, (ref,) = planned(store, 1)
    claim(store, ref)
    assert not store.leases.give_back(ref.id, 0, "other")
    assert store.leases.give_back(ref.id, 0, "worker")
    assert not store.leases.give_back(ref.id, 0, "worker")
    (ready,) = store.planning.dispatchable(1)
    assert (ready.id, ready.epoch) == (ref.id, 1)
    assert store.leases.claim(ref.id, 0, "worker") is None
    claimed = claim(store, ready)
    assert (claimed.attempts, claimed.crashes) == (2, 0)


def test_failing_a_micro_batch_gives_each_request_the_error(store: Store) -> None:
    job_id, (ref,) = planned(store, 3, each=3)
    error = RequestError("compute_crashed", "three attempts crashed")
    assert not store.leases.fail(ref.id, 0, "worker", error)
    claim(store, ref)
    assert store.leases.fail(ref.id, 0, "worker", error)
    assert codes(store.results.read(job_id)) == ["compute_crashed"] * 3
    assert store.jobs.get(job_id).state is JobState.FAILED


def test_heartbeats_of_those_who_hold_leases(store: Store) -> None:
    _, refs = planned(store, 2)
    for _ in range(3):
        store.heartbeats.beat("busy", ComputeSeconds())
    store.heartbeats.beat("idle", ComputeSeconds())
    claim(store, refs[0], "busy")
    claim(store, refs[1], "mute")
    assert sorted(store.heartbeats.of_lease_holders(), key=lambda beat: beat.owner) == [
        WorkerHeartbeat("busy", 3),
        WorkerHeartbeat("mute", 0),
    ]


def test_seconds_are_summed_over_workers_and_the_last_beat_counts(store: Store) -> None:
    assert store.heartbeats.compute_seconds() == ComputeSeconds(0.0, 0.0)
    store.heartbeats.beat("first", ComputeSeconds(engine_s=1.5, load_s=0.25))
    store.heartbeats.beat("second", ComputeSeconds(engine_s=0.5, load_s=2.0))
    store.heartbeats.beat("first", ComputeSeconds(engine_s=4.0, load_s=0.5))
    assert store.heartbeats.compute_seconds() == ComputeSeconds(engine_s=4.5, load_s=2.5)


def test_seconds_since_an_earlier_moment() -> None:
    since = ComputeSeconds(engine_s=4.5, load_s=2.5) - ComputeSeconds(engine_s=1.0, load_s=0.5)
    assert since == ComputeSeconds(engine_s=3.5, load_s=2.0)


def test_a_leaving_workers_leases_are_taken_back(store: Store) -> None:
    job_id, refs = planned(store, 3)
    lost = [claim(store, ref, "leaves") for ref in refs[:2]]
    kept = claim(store, refs[2], "alive")
    assert store.leases.give_back_all("leaves") == 2
    assert store.leases.give_back_all("leaves") == 0
    assert not store.leases.finish(lost[0].id, 0, "leaves", answers(lost[0]))
    assert store.leases.finish(kept.id, 0, "alive", answers(kept))
    for ref in store.planning.dispatchable(9):
        assert ref.epoch == 1
        assert compute(store, ref, "alive")
    assert store.jobs.get(job_id).state is JobState.COMPLETED
    assert store.heartbeats.of_lease_holders() == []


def test_an_error_message_with_a_nul_lands_on_both_databases(store: Store) -> None:
    job_id, (ref,) = planned(store, 1)
    claim(store, ref)
    assert store.leases.fail(ref.id, 0, "worker", RequestError("x", "a\x00b"))
    (result,) = store.results.read(job_id)
    assert result.error is not None
    assert result.error.message == "ab"


def test_an_owner_that_claimed_again_finishes_nothing_under_the_old_epoch(store: Store) -> None:
    """A thread of a worker comes late, while another one computes the same micro-batch anew."""
    job_id, (ref,) = planned(store, 2, each=2)
    old = claim(store, ref)
    assert store.leases.give_back(ref.id, 0, "worker")
    new = store.leases.claim(ref.id, 1, "worker")
    assert new is not None
    crash = Crash("the compute process was ended by SIGSEGV", allowed=2)
    error = RequestError("compute_failed", "it failed")
    assert not store.leases.finish(ref.id, old.epoch, "worker", answers(old))
    assert not store.leases.fail(ref.id, old.epoch, "worker", error)
    assert not store.suspects.add(ref.id, old.epoch, "worker", crash)
    assert not store.leases.give_back(ref.id, old.epoch, "worker")
    assert store.results.read(job_id) == []
    assert store.leases.finish(ref.id, new.epoch, "worker", answers(new))
    assert store.jobs.get(job_id).completed == 2


def owners(store: Store, job_id: str) -> list[str | None]:
    """Of each micro-batch, in the order of their ids."""
    statement = sa.select(micro_batch.c.owner).order_by(micro_batch.c.id)
    with store.database.reading() as connection:
        return list(connection.scalars(statement.where(micro_batch.c.job_id == job_id)))


def test_a_micro_batch_has_an_owner_only_while_it_is_leased(store: Store) -> None:
    job_id, (done, failed, returned, left, held) = planned(store, 5)
    assert compute(store, done)
    claim(store, failed)
    error = RequestError("internal_error", "broken")
    assert store.leases.fail(failed.id, 0, "worker", error)
    claim(store, returned)
    assert store.leases.give_back(returned.id, 0, "worker")
    claim(store, held)
    store.stopping.pause(job_id)
    assert store.leases.claim(left.id, 0, "worker") is None
    assert owners(store, job_id) == [None, None, None, None, "worker"]
    assert store.leases.give_back_all("worker") == 1
    assert owners(store, job_id) == [None] * 5

"""Work belongs to a model: no other may claim it, and a change of models leaves nothing behind."""

import logging

import pytest
import sqlalchemy as sa

from nightjar.jobs import lifecycle
from nightjar.jobs.errors import LifecycleError
from nightjar.jobs.records import (
    MicroBatchRef,
    NewResult,
    RequestError,
)
from nightjar.jobs.states import JobState, MicroBatchState
from nightjar.jobs.store import Store
from nightjar.jobs.store.ready import _NEXT_MODEL, _OF_NO_MODEL
from nightjar.jobs.store.replanning import _READY_BEFORE, _READY_BEHIND, _READY_BETWEEN
from nightjar.jobs.workers import Crash
from nightjar.pipeline.planning.model_change import SAY_EVERY_S, ModelChange
from nightjar.pipeline.queue.queues import short_model
from tests.jobs import before_the_next_write, submit
from tests.outcomes import answers, claim, compute
from tests.planned_models import ALPHA, BETA, GAMMA, plan

MANY = 100


def planned_for(
    store: Store, fingerprint: str, requests: int = 1, *, each: int = 1
) -> tuple[str, list[MicroBatchRef]]:
    """A job that was planned for a model."""
    job_id = submit(store, [{"prompt": "a", "max_tokens": 4, "temperature": 0}] * requests)
    return job_id, plan(store, job_id, fingerprint, each=each)


def test_only_a_worker_of_its_model_claims_a_micro_batch(store: Store) -> None:
    _, (ref,) = planned_for(store, ALPHA)
    # The name of the queue holds no more than the beginning of a fingerprint.
    for other in (BETA, "", ALPHA[:12], ALPHA[:-1] + "b"):
        assert store.leases.claim(ref.id, ref.epoch, "worker", other) is None
    assert store.planning.dispatchable(MANY) == [ref]
    claimed = store.leases.claim(ref.id, ref.epoch, "worker", ALPHA)
    assert claimed is not None
    assert claimed.fingerprint == ref.fingerprint == ALPHA


def test_a_model_without_workers_keeps_no_other_from_being_dispatched(store: Store) -> None:
    _, old = planned_for(store, ALPHA, 6)
    _, new = planned_for(store, BETA, 6)
    store.planning.mark_dispatched(store.planning.dispatchable(4))
    assert store.planning.dispatchable(4) == []
    sent = {ref.id for ref in store.planning.dispatched()}
    assert sent == {ref.id for ref in [*old[:4], *new[:4]]}
    assert compute(store, new[0])
    assert [ref.id for ref in store.planning.dispatchable(4)] == [new[4].id]


def test_what_nobody_computes_is_planned_anew_for_the_model_that_is_served(store: Store) -> None:
    job_id, refs = planned_for(store, ALPHA, 8, each=2)
    leased = claim(store, refs[0])
    store.planning.mark_dispatched(refs[1:2])
    taken = store.replanning.take_apart_others([BETA], MANY)
    assert {ref.id for ref in taken} == {ref.id for ref in refs[1:]}
    assert store.replanning.take_apart_others([BETA], MANY) == []
    assert store.jobs.get_in_detail(job_id)[1][MicroBatchState.REPLANNED] == 3
    for ref in refs[1:]:  # its message may still come
        assert store.leases.claim(ref.id, ref.epoch, "late", ALPHA) is None
    assert store.backlog.jobs_to_plan() == [job_id]
    again = plan(store, job_id, BETA, each=2)
    assert sum(ref.size for ref in again) == 6
    assert store.leases.finish(leased.id, leased.epoch, "worker", answers(leased))
    for ref in again:
        assert compute(store, ref)
    assert store.jobs.get(job_id).state is JobState.COMPLETED
    assert len(store.results.read(job_id)) == 8


def test_what_is_claimed_while_it_is_taken_apart_stays_with_its_worker(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, refs = planned_for(store, ALPHA, 2)
    before_the_next_write(store, monkeypatch, lambda: claim(store, refs[0]))
    assert [ref.id for ref in store.replanning.take_apart_others([BETA], MANY)] == [refs[1].id]
    assert store.leases.held_by("worker") == refs[:1]
    assert len(store.backlog.queued_requests(job_id, MANY)) == 1


def test_work_of_the_served_model_is_left_as_it_is(store: Store) -> None:
    _, refs = planned_for(store, BETA, 2)
    store.planning.mark_dispatched(refs[:1])
    assert store.replanning.take_apart_others([BETA], MANY) == []
    assert store.planning.dispatched() == refs[:1]


def test_several_served_models_keep_their_work_and_the_others_lose_theirs(store: Store) -> None:
    """Before the first served one, between two, and behind the last; ready and dispatched."""
    kept = [planned_for(store, each)[1][0] for each in (BETA, "d" * 64)]
    others = [planned_for(store, each)[1][0] for each in (ALPHA, GAMMA, "e" * 64, "")]
    store.planning.mark_dispatched([kept[0], others[1]])
    taken = store.replanning.take_apart_others(["d" * 64, BETA], MANY)
    assert sorted(ref.id for ref in taken) == sorted(ref.id for ref in others)
    assert [ref.id for ref in store.planning.dispatchable(MANY)] == [kept[1].id]
    assert [ref.id for ref in store.planning.dispatched()] == [kept[0].id]


def test_a_worker_of_several_models_claims_the_work_of_each_and_no_other(store: Store) -> None:
    refs = [planned_for(store, each)[1][0] for each in (ALPHA, BETA, GAMMA)]
    found = [store.leases.claim(ref.id, ref.epoch, "worker", ALPHA, BETA) for ref in refs]
    assert [None if one is None else one.fingerprint for one in found] == [ALPHA, BETA, None]


@pytest.mark.parametrize("forbidden", ["MICRO_BATCH_TRANSITIONS", "REQUEST_TRANSITIONS"])
def test_what_the_table_of_states_forbids_is_not_done(
    store: Store, monkeypatch: pytest.MonkeyPatch, forbidden: str
) -> None:
    _, refs = planned_for(store, ALPHA)
    ends = {state: frozenset[object]() for state in getattr(lifecycle, forbidden)}
    monkeypatch.setattr(lifecycle, forbidden, ends)
    with pytest.raises(LifecycleError, match="may not be followed by"):
        store.replanning.take_apart_others([BETA], MANY)
    assert store.planning.dispatchable(MANY) == refs


def test_planning_anew_goes_in_bounded_steps(store: Store) -> None:
    _, refs = planned_for(store, ALPHA, 5)
    store.planning.mark_dispatched(refs[:2])
    sizes = []
    while taken := store.replanning.take_apart_others([BETA], 2):
        sizes.append(len(taken))
    assert sizes == [2, 2, 1]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_looking_for_other_models_reads_no_backlog(store: Store) -> None:
    """A step in the index for each model: 50,000 ready micro-batches took 170 ms a tick."""
    engine = store.database.engine
    for look in (_NEXT_MODEL, _OF_NO_MODEL, _READY_BEFORE, _READY_BEHIND, _READY_BETWEEN):
        asked = look.limit(9).params(after="", above=ALPHA, below=BETA)
        literal = asked.compile(engine, compile_kwargs={"literal_binds": True})
        with engine.begin() as connection:
            steps = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {literal}").all()
        assert ["ix_micro_batch_ready (fingerprint" in str(step) for step in steps] == [True]


def test_what_names_no_model_is_planned_anew_and_others_may_stay(store: Store) -> None:
    """A planner of the version before leaves the column out."""
    _, (alpha,) = planned_for(store, ALPHA)
    job_id, (ref,) = planned_for(store, ALPHA)
    leave_out = sa.text("UPDATE micro_batch SET fingerprint = DEFAULT WHERE id = :id")
    if store.database.is_sqlite:
        leave_out = sa.text("UPDATE micro_batch SET fingerprint = '' WHERE id = :id")
    store.database.write(lambda connection: connection.execute(leave_out, {"id": ref.id}))
    assert store.leases.claim(ref.id, ref.epoch, "worker", BETA) is None
    taken = store.replanning.take_apart_others([BETA], MANY, unnamed_alone=True)
    assert [item.id for item in taken] == [ref.id]
    assert store.backlog.jobs_to_plan() == [job_id]
    assert store.planning.dispatchable(MANY) == [alpha]


def test_suspects_and_retried_failures_stay_with_their_model(store: Store) -> None:
    job_id, (ref,) = planned_for(store, ALPHA, 2, each=2)
    claimed = claim(store, ref)
    crash = Crash("the compute process was ended by SIGSEGV", allowed=1)
    assert store.suspects.add(claimed.id, claimed.epoch, "worker", crash)
    halves = store.planning.dispatchable(MANY)
    assert [(half.isolated, half.fingerprint) for half in halves] == [(True, ALPHA)] * 2
    for half in halves:
        held = claim(store, half)
        assert store.suspects.add(held.id, held.epoch, "worker", crash)
    assert store.retries.retry(job_id) == 2
    assert [again.fingerprint for again in store.planning.dispatchable(MANY)] == [ALPHA] * 2


def test_followers_wait_while_their_leader_is_planned_anew(store: Store) -> None:
    body = {"prompt": "a", "max_tokens": 4, "temperature": 0}
    job_id = submit(store, [body, body, body], merge_equal=True)
    plan(store, job_id, ALPHA)
    assert len(store.replanning.take_apart_others([BETA], MANY)) == 1
    (ref,) = plan(store, job_id, BETA)
    assert ref.size == 1
    assert compute(store, ref)
    assert store.jobs.get(job_id).completed == 3


def test_a_stopped_job_ends_though_its_work_was_taken_apart(store: Store) -> None:
    job_id, _ = planned_for(store, ALPHA, 2)
    store.stopping.pause(job_id)
    assert len(store.replanning.take_apart_others([BETA], MANY)) == 2
    assert store.stopping.cancel(job_id).state is JobState.CANCELLED


def test_a_request_that_ended_is_not_queued_again(store: Store) -> None:
    """It crashed, its half was retried, and the other half has its answer."""
    job_id, (ref,) = planned_for(store, ALPHA, 2, each=2)
    claimed = claim(store, ref)
    first, second = claimed.requests
    error = RequestError("internal_error", "it failed")
    results = [NewResult(first.id, 200, {}), NewResult(second.id, 500, None, error)]
    assert store.leases.finish(claimed.id, claimed.epoch, "worker", results)
    assert store.replanning.take_apart_others([BETA], MANY) == []
    assert store.jobs.get(job_id).ended == 2


def test_a_model_without_workers_is_named_once_a_minute(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    moment = 0.0
    change = ModelChange(store.replanning, [BETA], "finish", print, clock=lambda: moment)
    _, of_alpha = planned_for(store, ALPHA, 2)
    _, of_beta = planned_for(store, BETA)
    told: list[int] = []
    for moment in (0.0, SAY_EVERY_S - 1.0, SAY_EVERY_S):  # noqa: B007 - the clock reads it
        with caplog.at_level(logging.WARNING):
            change.warn_of_waiting([*of_alpha, *of_beta])
        told.append(sum(one.levelno == logging.WARNING for one in caplog.records))
    assert told == [1, 1, 2]
    assert short_model(ALPHA) in caplog.text

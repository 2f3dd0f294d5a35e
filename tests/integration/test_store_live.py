"""Single calls in the store: they go before jobs, take no room from them, and do not pile up."""

from datetime import timedelta

import pytest
import sqlalchemy as sa

from nightjar.jobs.errors import QuotaError
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import (
    EncodedRequest,
    MicroBatchRef,
    NewJob,
    NewMicroBatch,
    NewResult,
    PlannedCall,
    RequestError,
)
from nightjar.jobs.states import JobState, MicroBatchState, RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.live import PURGED_PER_STEP
from nightjar.jobs.store.submission import new_job_id
from nightjar.jobs.store.tables import job, landing, micro_batch, request, result
from tests.jobs import planned, submit
from tests.outcomes import answers, claim, compute

MODEL = "f" * 64
BODY = validate_body(RequestKind.GENERATE, {"prompt": "hello", "max_tokens": 4})
TABLES = (job, request, micro_batch, result, landing)


def call(store: Store, *, quick: bool = True) -> tuple[str, MicroBatchRef | None]:
    """Submit a call, planned at once or not."""
    job_id = new_job_id()
    plan = PlannedCall(
        EncodedRequest(0, [[1, 2, 3]]), NewMicroBatch(RequestKind.GENERATE, 32, [0], 7), MODEL
    )
    new = NewJob("tiny", priority=9, completion_window_s=60)
    ref = store.live.submit(new, job_id, RequestKind.GENERATE, BODY, plan if quick else None)
    assert (ref is not None) == quick
    return job_id, ref


def counts(store: Store) -> list[int]:
    """The rows of each table."""
    with store.database.reading() as connection:
        found = [connection.scalar(sa.select(sa.func.count()).select_from(t)) for t in TABLES]
    return [number or 0 for number in found]


def age(store: Store, job_ids: list[str], hours: int) -> None:
    """Make calls older: their ids tell when they were made."""
    with store.database.engine.begin() as connection:
        if store.database.is_sqlite:
            connection.exec_driver_sql("PRAGMA defer_foreign_keys = ON")
        for job_id in job_ids:
            made = int(job_id[4:16], 16) - hours * 3_600_000
            older = f"job_{made:012x}{job_id[16:]}"
            row = connection.execute(sa.select(job).where(job.c.id == job_id)).mappings().one()
            connection.execute(sa.insert(job).values({**row, "id": older}))
            for table in (request, micro_batch, result, landing):
                moved = sa.update(table).where(table.c.job_id == job_id).values(job_id=older)
                connection.execute(moved)
            connection.execute(sa.delete(job).where(job.c.id == job_id))


def test_a_call_is_claimed_computed_and_found_when_it_is_over(store: Store) -> None:
    job_id, ref = call(store)
    other, _ = call(store)
    assert ref is not None
    assert store.planning.dispatched()[0] == ref
    assert store.planning.dispatchable(16) == []
    claimed = claim(store, ref)
    assert claimed.live
    assert (claimed.requests[0].body, claimed.requests[0].segments) == (BODY, [[1, 2, 3]])
    assert (claimed.requests[0].custom_id, claimed.requests[0].index) == (job_id, 0)
    assert store.live.ended([job_id, other]) == []
    assert store.leases.finish(ref.id, ref.epoch, "worker", answers(claimed), live=True)
    (outcome,) = store.live.ended([job_id, other])
    assert (outcome.job_id, outcome.status_code, outcome.error) == (job_id, 200, None)
    assert outcome.body == {"text": f"answer to {job_id}"}
    assert store.jobs.get(job_id).state is JobState.COMPLETED
    assert store.live.ended([]) == []


def test_a_failure_tells_its_status_code_and_field(store: Store) -> None:
    job_id, ref = call(store)
    assert ref is not None
    claimed = claim(store, ref)
    failed = NewResult.failure(claimed.requests[0].id, "refused", "no good", param="body.stop")
    store.leases.finish(ref.id, ref.epoch, "worker", [failed])
    (outcome,) = store.live.ended([job_id])
    assert (outcome.status_code, outcome.body) == (400, None)
    assert outcome.error == RequestError("refused", "no good", "body.stop")


def test_a_call_without_a_plan_is_planned_before_every_job(store: Store) -> None:
    submit(store, [{"prompt": "a"}], priority=9)
    job_id, _ = call(store, quick=False)
    later, _ = call(store, quick=False)
    found = store.backlog.next_to_plan()
    assert found is not None
    assert (found.id, found.live) == (job_id, True)
    (queued,) = store.backlog.queued_requests(job_id, 10)
    encoded = [EncodedRequest(queued.id, [[1]])]
    batches = [NewMicroBatch(RequestKind.GENERATE, 32, [queued.id], 5)]
    (ref,) = store.planning.save_plan(job_id, encoded, batches, fingerprint=MODEL, live=found.live)
    assert ref.live
    assert store.planning.dispatchable(16) == [ref]
    following = store.backlog.next_to_plan()
    assert following is not None
    assert following.id == later


def test_calls_go_out_before_jobs_and_take_no_room_from_them(store: Store) -> None:
    _, refs = planned(store, 4, priority=9)
    store.planning.mark_dispatched(refs[:2])
    ids = []
    for _ in range(3):
        job_id, ref = call(store)
        assert ref is not None
        store.planning.requeue([ref])  # its message was not sent
        ids.append(job_id)
    found = store.planning.dispatchable(2)
    assert [ref.job_id for ref in found] == ids
    assert all(ref.live for ref in found)
    store.planning.mark_dispatched(found)
    store.stopping.pause(ids[0])
    store.planning.requeue(found)
    room_for_one = store.planning.dispatchable(3)
    assert [ref.job_id for ref in room_for_one if ref.live] == ids[1:]
    assert [ref.id for ref in room_for_one if not ref.live] == [refs[2].id]


def test_jobs_are_listed_without_calls(store: Store) -> None:
    first = submit(store, [{"prompt": "a"}])
    job_id, _ = call(store)
    second = submit(store, [{"prompt": "a"}])
    assert [found.id for found in store.jobs.newest()] == [second, first]
    assert [found.id for found in store.jobs.newest(after=second)] == [first]
    assert store.jobs.get(job_id).id == job_id


def test_a_cancelled_call_ends_at_once(store: Store) -> None:
    job_id, ref = call(store)
    store.stopping.cancel(job_id)
    (outcome,) = store.live.ended([job_id])
    assert outcome.error is not None
    assert (outcome.status_code, outcome.error.code) == (499, "cancelled")
    assert ref is not None
    assert store.leases.claim(ref.id, ref.epoch, "worker", MODEL) is None


def test_a_call_expires_when_its_api_has_died(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, _ = call(store)
    from nightjar.jobs.store import stopping  # noqa: PLC0415 - its clock is turned

    clock = stopping.now
    monkeypatch.setattr(stopping, "now", lambda: clock() + timedelta(seconds=61))
    assert store.stopping.expire() == [job_id]
    store.stopping.finish()
    assert store.jobs.get(job_id).state is JobState.EXPIRED


def test_old_calls_go_and_jobs_and_waiting_calls_stay(store: Store) -> None:
    _, refs = planned(store, 1)
    compute(store, refs[0])
    job_rows = counts(store)
    ended = []
    for _ in range(5):
        job_id, ref = call(store)
        assert ref is not None
        compute(store, ref)
        ended.append(job_id)
    waiting, _ = call(store)  # also holds the newest request and micro-batch
    age(store, [*ended, waiting], hours=2)
    young, ref = call(store)
    assert ref is not None
    compute(store, ref)
    assert store.live.purge(3_600) == len(ended)
    assert counts(store) == [
        there + own for there, own in zip(job_rows, (2, 2, 2, 1, 1), strict=True)
    ]
    assert store.live.ended([young])
    assert store.live.purge(3_600) == 0


def test_the_newest_rows_stay_so_that_no_id_comes_again(store: Store) -> None:
    job_id, ref = call(store)
    assert ref is not None
    compute(store, ref)
    assert store.live.purge(-60) == 0
    later, following = call(store)
    assert following is not None
    assert following.id > ref.id
    compute(store, following)
    assert store.live.purge(-60) == 1
    assert not store.live.ended([job_id])
    assert store.live.ended([later])


def test_a_purge_goes_in_bounded_steps(store: Store) -> None:
    for _ in range(PURGED_PER_STEP + 2):
        job_id, ref = call(store)
        assert ref is not None
        compute(store, ref)
    assert store.live.purge(-60, patience_s=0.0) == PURGED_PER_STEP
    assert store.live.purge(-60) == 1
    assert counts(store) == [1, 1, 1, 1, 1]
    assert store.live.ended([job_id])


def test_micro_batches_of_calls_are_no_one_elses(store: Store) -> None:
    _, ref = call(store)
    assert ref is not None
    assert store.leases.claim(ref.id, ref.epoch, "worker", "0" * 64) is None
    claimed = claim(store, ref)
    assert store.leases.give_back(ref.id, ref.epoch, "worker")
    (again,) = store.planning.dispatchable(1)
    assert (again.id, again.epoch, again.live) == (ref.id, claimed.epoch + 1, True)
    details = store.jobs.get_in_detail(ref.job_id)[1]
    assert details[MicroBatchState.READY] == 1


def test_a_call_counts_for_the_daily_quota_and_stays_while_it_counts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KEPT_S", "KEPT_TIMES"):  # no sum is kept
        monkeypatch.setattr(f"nightjar.jobs.store.quotas.{name}", 0)
    store.accounts.change_tenant("default", tokens_a_day=1)
    job_id, ref = call(store)
    call(store)  # holds the newest rows, which are never deleted
    assert ref is not None
    assert compute(store, ref)
    with pytest.raises(QuotaError, match="tokens of today"):
        call(store)
    age(store, [job_id], 2)
    assert store.live.purge(3_600) == 0
    store.accounts.change_tenant("default", tokens_a_day=None)
    assert store.live.purge(3_600) == 1

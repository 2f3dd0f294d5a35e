"""Open jobs: rows come in parts, each of them once, and the job ends when it is sealed."""

from datetime import timedelta

import pytest
import sqlalchemy as sa

from nightjar.jobs.accounts import Tenant, TenantLimits
from nightjar.jobs.append_records import MOST_ROWS, MOST_ROWS_AHEAD
from nightjar.jobs.errors import AppendPlaceError, LifecycleError, QuotaError, UnknownJobError
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import NewJob, NewRequest, NewResult, RejectedRow
from nightjar.jobs.states import JobState, RequestKind
from nightjar.jobs.store import Store, appending, tables
from nightjar.jobs.store.common import now
from nightjar.jobs.store.waiting import WaitsFor
from tests.outcomes import codes

pytestmark = pytest.mark.one_database

DRAWN = {"prompt": "hello", "max_tokens": 4, "temperature": 0.5}


def good(index: int, custom_id: str | None = None, **more: object) -> NewRequest:
    body = validate_body(RequestKind.GENERATE, DRAWN | more)
    return NewRequest(index, index + 1, custom_id or f"row-{index}", RequestKind.GENERATE, body)


def bad(index: int) -> RejectedRow:
    return RejectedRow(index, index + 1, f"row-{index}", "invalid_value", "no good", "body.stop")


def finish_queued(store: Store, job_id: str) -> None:
    """Answer whatever waits."""
    known = [
        NewResult(one.id, 200, {"choices": []}, prompt_tokens=3)
        for one in store.backlog.queued_requests(job_id, 100)
    ]
    store.planning.save_plan(job_id, [], [], answered=known)


def test_rows_come_in_parts_and_the_job_ends_when_it_is_sealed(store: Store) -> None:
    job, existing = store.appending.open(NewJob("tiny", metadata={"night": "밤"}))
    assert (job.total, job.takes_rows, job.is_over, existing) == (0, True, False, False)
    assert store.jobs.waiting_for(job.id).waits_for == (WaitsFor.ROWS,)
    first = store.appending.append(job.id, 0, [good(0), bad(1)], "a")
    assert (first.total, first.rejected, first.existing) == (2, 1, False)
    finish_queued(store, job.id)
    idle = store.jobs.get(job.id)
    assert (idle.state, idle.completed, idle.failed, idle.is_over) == (
        JobState.RUNNING,
        1,
        1,
        False,
    )
    assert store.jobs.waiting_for(job.id).waits_for == (WaitsFor.ROWS,)
    store.appending.append(job.id, 2, [good(2), good(3, "row-0")], "b")
    assert store.appending.seal(job.id, 4).is_over is False
    finish_queued(store, job.id)
    ended = store.jobs.get(job.id)
    assert (ended.state, ended.total) == (JobState.COMPLETED_WITH_FAILURES, 4)
    assert (ended.completed, ended.failed, ended.takes_rows) == (2, 2, False)
    assert codes(store.results.read(job.id)) == [None, "invalid_value", None, "duplicate_custom_id"]
    landed = store.results.page(job.id, order="landed")
    assert sorted(one.index for one in landed.records) == [0, 1, 2, 3]
    assert landed.complete


def test_the_last_outcome_may_land_before_the_seal(store: Store) -> None:
    job, _ = store.appending.open(NewJob("tiny"))
    store.appending.append(job.id, 0, [good(0)], "a")
    finish_queued(store, job.id)
    assert store.appending.seal(job.id).state is JobState.COMPLETED
    assert store.appending.seal(job.id).state is JobState.COMPLETED


def test_a_part_that_is_sent_twice_is_stored_once(store: Store) -> None:
    job, _ = store.appending.open(NewJob("tiny"))
    store.appending.append(job.id, 0, [good(0)], "a")
    again = store.appending.append(job.id, 0, [good(0)], "a")
    assert (again.total, again.existing) == (1, True)
    with pytest.raises(AppendPlaceError, match="has 1 rows, not 0") as raised:
        store.appending.append(job.id, 0, [good(0, "other")], "another producer's")
    assert raised.value.total == 1
    with pytest.raises(AppendPlaceError):
        store.appending.append(job.id, 2, [good(2)], "one is missing")
    with pytest.raises(AppendPlaceError):
        store.appending.seal(job.id, 2)
    store.appending.seal(job.id, 1)
    assert store.appending.append(job.id, 0, [good(0)], "a").existing
    with pytest.raises(LifecycleError, match="was sealed"):
        store.appending.append(job.id, 1, [good(1)], "b")


def test_equal_requests_of_one_part_are_computed_once(store: Store) -> None:
    job, _ = store.appending.open(NewJob("tiny"))
    rows = [good(index, temperature=0) for index in range(3)]
    store.appending.append(job.id, 0, rows, "a")
    assert [one.index for one in store.backlog.queued_requests(job.id, 10)] == [0]
    finish_queued(store, job.id)
    assert store.appending.seal(job.id).completed == 3


def test_a_key_opens_one_job(store: Store) -> None:
    new = NewJob("tiny", "tonight")
    job, _ = store.appending.open(new)
    store.appending.append(job.id, 0, [good(0)], "a")
    again, existing = store.appending.open(new)
    assert (again.id, again.total, existing) == (job.id, 1, True)


def test_an_open_job_can_be_cancelled_and_expires(store: Store) -> None:
    empty, _ = store.appending.open(NewJob("tiny"))
    assert store.stopping.cancel(empty.id).state is JobState.CANCELLED
    with pytest.raises(LifecycleError, match="is cancelled"):
        store.appending.append(empty.id, 0, [good(0)], "a")
    half, _ = store.appending.open(NewJob("tiny"))
    store.appending.append(half.id, 0, [good(0), good(1)], "a")
    ended = store.stopping.cancel(half.id)
    assert (ended.state, ended.cancelled, ended.takes_rows) == (JobState.CANCELLED, 2, False)
    past = now() - timedelta(hours=1)
    late, _ = store.appending.open(NewJob("tiny", completion_window_s=60.0, created_at=past))
    assert store.stopping.expire() == [late.id]
    store.stopping.finish()
    assert store.jobs.get(late.id).state is JobState.EXPIRED


def test_what_cannot_be_appended_or_sealed(store: Store) -> None:
    with pytest.raises(UnknownJobError):
        store.appending.append("job_none", 0, [good(0)], "a")
    job, _ = store.appending.open(NewJob("tiny"))
    with pytest.raises(LifecycleError, match="has no rows"):
        store.appending.seal(job.id)
    with store.jobs.submit(NewJob("tiny")) as submission:
        submission.add([good(0)])
    with pytest.raises(LifecycleError, match="was sealed"):
        store.appending.append(submission.job_id, 1, [good(1)], "a")


def test_a_job_that_a_worker_of_the_version_before_has_ended(store: Store) -> None:
    job, _ = store.appending.open(NewJob("tiny"))
    ending = sa.update(tables.job).values(state=JobState.COMPLETED, finished_at=now())
    store.database.write(lambda connection: connection.execute(ending))
    with pytest.raises(LifecycleError, match="is completed: it takes no more rows"):
        store.appending.append(job.id, 0, [good(0)], "a")


def test_a_producer_that_is_too_fast_has_to_wait(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_ROWS_AHEAD >= MOST_ROWS  # a part of any size can be appended
    monkeypatch.setattr(appending, "MOST_ROWS_AHEAD", 2)
    job, _ = store.appending.open(NewJob("tiny"))
    store.appending.append(job.id, 0, [good(0), good(1)], "a")
    with pytest.raises(QuotaError, match="2 rows of this job have no outcome") as raised:
        store.appending.append(job.id, 2, [good(2)], "b")
    assert raised.value.retry_after_s == 1.0
    finish_queued(store, job.id)
    assert store.appending.append(job.id, 2, [good(2)], "b").total == 3


def test_a_tenants_quota_of_waiting_rows_holds(store: Store) -> None:
    store.accounts.create_tenant(Tenant("owls", limits=TenantLimits(rows_waiting=2)))
    job, _ = store.appending.open(NewJob("tiny", tenant="owls"))
    store.appending.append(job.id, 0, [good(0), good(1)], "a")
    with pytest.raises(QuotaError, match="rows of this tenant wait already"):
        store.appending.append(job.id, 2, [good(2)], "b")
    assert store.jobs.get(job.id).total == 2

"""What tenants may use: rows that wait, tokens a day, bytes of files."""

import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa

from nightjar.jobs.accounts import Tenant, TenantLimits
from nightjar.jobs.errors import QuotaError
from nightjar.jobs.records import (
    EncodedRequest,
    MicroBatchRef,
    NewJob,
    NewMicroBatch,
    NewResult,
)
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store, quotas, submission
from nightjar.jobs.store.tables import job
from tests.jobs import submit_for as submit
from tests.outcomes import claim, compute

pytestmark = pytest.mark.one_database


def planned(store: Store, job_id: str, rows: int) -> list[MicroBatchRef]:
    """Micro-batches of one row each."""
    ids = [request.id for request in store.backlog.queued_requests(job_id, rows)]
    batches = [NewMicroBatch(RequestKind.GENERATE, 32, [one], 7) for one in ids]
    encoded = [EncodedRequest(one, [[1, 2]]) for one in ids]
    return store.planning.save_plan(job_id, encoded, batches, [])


def test_rows_that_wait_are_bounded(store: Store) -> None:
    store.accounts.create_tenant(Tenant("owls", limits=TenantLimits(rows_waiting=3)))
    first = submit(store, "owls", 2)
    assert store.quotas.rows_waiting("owls") == 2
    with pytest.raises(QuotaError, match="2 rows of this tenant wait already") as caught:
        submit(store, "owls", 2)
    assert (caught.value.code, caught.value.retry_after_s) == ("rows_waiting_exceeded", 60)
    with pytest.raises(QuotaError, match="a job of 4 rows never fits") as caught:
        submit(store, "owls", 4)
    assert caught.value.retry_after_s is None
    assert [one.id for one in store.jobs.newest(tenant="owls")] == [first]
    submit(store, "bats", 9)  # others are not bounded by it
    for ref in planned(store, first, 2):
        compute(store, ref)
    assert store.quotas.rows_waiting("owls") == 0
    submit(store, "owls", 3)
    with (
        pytest.raises(QuotaError, match="3 rows"),
        store.jobs.submit(NewJob("tiny", tenant="owls")),
    ):
        pytest.fail("refused before anything is read")


def test_a_paused_and_a_cancelled_job_count_by_what_is_left(store: Store) -> None:
    store.accounts.create_tenant(Tenant("owls", limits=TenantLimits(rows_waiting=2)))
    job_id = submit(store, "owls", 2)
    store.stopping.pause(job_id)
    assert store.quotas.rows_waiting("owls") == 2
    store.stopping.cancel(job_id)
    assert store.quotas.rows_waiting("owls") == 0


def test_a_known_idempotency_key_needs_no_quota(store: Store) -> None:
    store.accounts.create_tenant(Tenant("owls", limits=TenantLimits(rows_waiting=1)))
    job_id = submit(store, "owls", 1, "night")
    assert submit(store, "owls", 1, "night") == job_id


def test_rows_that_land_in_segments_are_bounded_too(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "MOST_AT_ONCE", 2)
    store.accounts.create_tenant(Tenant("owls", limits=TenantLimits(rows_waiting=5)))
    submit(store, "owls", 3)
    with pytest.raises(QuotaError):
        submit(store, "owls", 3)
    submit(store, "owls", 2)
    assert store.quotas.rows_waiting("owls") == 5


def test_two_that_land_in_segments_at_once_do_not_pass_the_bound(
    sqlite_url: str, migrated_sqlite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused at its end, and leaves no row."""
    shutil.copy(migrated_sqlite_file, sqlite_url.removeprefix("sqlite:///"))
    store = Store(sqlite_url)
    monkeypatch.setattr(submission, "MOST_AT_ONCE", 2)
    store.accounts.create_tenant(Tenant("owls", limits=TenantLimits(rows_waiting=5)))
    run = submission.SegmentedLanding.run

    def later(self, total, finish):  # type: ignore[no-untyped-def]
        monkeypatch.setattr(submission.SegmentedLanding, "run", run)
        submit(store, "owls", 3)
        run(self, total, finish)

    monkeypatch.setattr(submission.SegmentedLanding, "run", later)
    with pytest.raises(QuotaError):
        submit(store, "owls", 4)
    assert [one.total for one in store.jobs.newest(tenant="owls")] == [3]
    with store.database.reading() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM request")) == 3
    store.close()


def test_tokens_are_counted_by_the_day_they_landed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5 tokens a row (tests/outcomes.py); the days are set by hand."""
    monkeypatch.setattr(quotas, "KEPT_S", 0.0)
    monkeypatch.setattr(quotas, "KEPT_TIMES", 0)
    store.accounts.create_tenant(Tenant("owls", limits=TenantLimits(tokens_a_day=15)))
    first, second = submit(store, "owls", 3), submit(store, "owls", 1)
    submit(store, "bats", 1)
    refs = planned(store, first, 3)
    compute(store, refs[0])
    compute(store, refs[1])
    assert (store.quotas.tokens_today("owls"), store.quotas.tokens_today("bats")) == (10, 0)
    submit(store, "owls", 1)
    compute(store, planned(store, second, 1)[0])
    with pytest.raises(QuotaError, match="15 of 15 tokens of today") as caught:
        submit(store, "owls", 1)
    assert caught.value.code == "insufficient_quota"
    assert caught.value.retry_after_s is not None
    assert 0 < caught.value.retry_after_s <= 86_400
    submit(store, "bats", 1)
    # The day after: what landed before is not counted, and a job of yesterday begins anew.
    yesterday = sa.update(job).values(tokens_day=job.c.tokens_day - 1)
    store.database.write(lambda connection: connection.execute(yesterday))
    assert store.quotas.tokens_today("owls") == 0
    compute(store, refs[2])
    assert store.quotas.tokens_today("owls") == 5
    assert store.jobs.get(first).prompt_tokens == 9
    submit(store, "owls", 1)


def test_a_days_sum_is_kept_for_a_moment(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "KEPT_S", 3_600.0)
    store.accounts.create_tenant(Tenant("owls", limits=TenantLimits(tokens_a_day=5)))
    job_id = submit(store, "owls", 1)
    compute(store, planned(store, job_id, 1)[0])
    submit(store, "owls", 1)  # the sum of before
    monkeypatch.setattr(quotas, "today", lambda: 1)
    submit(store, "owls", 1)  # of another day
    monkeypatch.undo()
    with pytest.raises(QuotaError):
        submit(store, "owls", 1)


def test_bytes_of_files_are_bounded(store: Store) -> None:
    asked: list[str] = []

    def stored(tenant: str) -> int:
        asked.append(tenant)
        return 4

    store.accounts.create_tenant(Tenant("owls", limits=TenantLimits(bytes_stored=10)))
    assert store.quotas.may_store("owls", 6, stored)
    assert not store.quotas.may_store("owls", 7, stored)
    assert store.quotas.may_store("default", 10**15, stored)
    assert asked == ["owls", "owls"]  # without a limit nothing is summed


def failed(store: Store, name: str, rows: int) -> str:
    """A job of the tenant whose rows failed through no fault of theirs."""
    job_id = submit(store, name, rows)
    for ref in planned(store, job_id, rows):
        claimed = claim(store, ref)
        fault = NewResult.failure(claimed.requests[0].id, "internal_error", "oh", status=500)
        assert store.leases.finish(ref.id, ref.epoch, "worker", [fault])
    return job_id


def test_a_retry_is_bounded_by_the_rows_that_wait(store: Store) -> None:
    store.accounts.create_tenant(Tenant("owls", limits=TenantLimits(rows_waiting=3)))
    job_id = failed(store, "owls", 3)
    other = submit(store, "owls", 1)
    with pytest.raises(QuotaError, match=r"1 rows of this tenant wait already.*retry it") as caught:
        store.retries.retry(job_id)
    assert (caught.value.code, caught.value.retry_after_s) == ("rows_waiting_exceeded", 60)
    assert store.jobs.get(job_id).failed == 3
    store.accounts.change_tenant("owls", rows_waiting=2)
    with pytest.raises(QuotaError, match="a retry of 3 rows never fits") as caught:
        store.retries.retry(job_id)
    assert caught.value.retry_after_s is None
    store.accounts.change_tenant("owls", rows_waiting=3)
    compute(store, planned(store, other, 1)[0])
    assert store.retries.retry(job_id) == 3
    assert store.quotas.rows_waiting("owls") == 3
    assert store.retries.retry(job_id) == 0  # nothing is left, so nothing is asked


def test_a_retry_is_bounded_by_the_tokens_of_the_day(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "KEPT_S", 0.0)
    monkeypatch.setattr(quotas, "KEPT_TIMES", 0)
    store.accounts.create_tenant(Tenant("owls", limits=TenantLimits(tokens_a_day=5)))
    job_id = failed(store, "owls", 1)
    done = submit(store, "owls", 1)
    compute(store, planned(store, done, 1)[0])
    with pytest.raises(QuotaError, match="5 of 5 tokens of today"):
        store.retries.retry(job_id)
    store.accounts.change_tenant("owls", tokens_a_day=None)
    assert store.retries.retry(job_id) == 1

"""Tenants and keys in the store, and what tenants may use."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from nightjar.jobs.accounts import (
    KeyState,
    NewKey,
    Tenant,
    TenantLimits,
    digest_of,
    is_key,
)
from nightjar.jobs.errors import AccountError, QuotaError
from nightjar.jobs.lines.schemas import validate_body
from nightjar.jobs.records import EncodedRequest as Encoded
from nightjar.jobs.records import MicroBatchRef, NewJob, NewMicroBatch, NewRequest
from nightjar.jobs.states import RequestKind, Scope
from nightjar.jobs.store import Store, quotas, submission
from nightjar.jobs.store.account_tables import api_key
from nightjar.jobs.store.idempotency import stored_key
from nightjar.jobs.store.tables import job
from tests.outcomes import compute

BODY = validate_body(RequestKind.GENERATE, {"prompt": "a", "max_tokens": 4, "temperature": 0})
DAY = timedelta(days=1)


def now() -> datetime:
    return datetime.now(UTC)


def submit(store: Store, tenant: str, rows: int, key: str | None = None) -> str:
    with store.jobs.submit(NewJob("tiny", key, merge_equal=False, tenant=tenant)) as arriving:
        arriving.add(
            NewRequest(n, n + 1, f"row-{n}", RequestKind.GENERATE, BODY) for n in range(rows)
        )
    return arriving.job_id


def planned(store: Store, job_id: str, rows: int) -> list[MicroBatchRef]:
    """Micro-batches of one row each."""
    ids = [request.id for request in store.backlog.queued_requests(job_id, rows)]
    batches = [NewMicroBatch(RequestKind.GENERATE, 32, [one], 7) for one in ids]
    return store.planning.save_plan(job_id, [Encoded(one, [[1, 2]]) for one in ids], batches, [])


def test_default_is_always_there_and_may_be_changed(store: Store) -> None:
    assert store.accounts.tenants() == [Tenant("default")]
    assert store.accounts.tenant("default").limits == TenantLimits()
    changed = store.accounts.change_tenant("default", rows_waiting=5)
    assert changed.limits == TenantLimits(rows_waiting=5)
    assert [one.name for one in store.accounts.tenants()] == ["default"]


def test_a_tenant_is_made_and_changed(store: Store) -> None:
    made = store.accounts.create_tenant(
        Tenant("night-owls", 3.0, TenantLimits(requests_a_minute=60, tokens_a_day=10**9))
    )
    assert made.created_at is not None
    assert made == store.accounts.tenant("night-owls")
    changed = store.accounts.change_tenant("night-owls", requests_a_minute=None, bytes_stored=7)
    assert changed.limits == TenantLimits(tokens_a_day=10**9, bytes_stored=7)
    assert changed.weight == 3.0
    assert store.accounts.change_tenant("night-owls", weight=0.5).weight == 0.5
    assert [one.name for one in store.accounts.tenants()] == ["default", "night-owls"]
    with pytest.raises(AccountError, match="already; change it by `nightjar tenants set night-ow"):
        store.accounts.create_tenant(Tenant("night-owls"))


def test_what_cannot_be_used_is_refused(store: Store) -> None:
    """Every fault is in tests/unit/test_jobs_accounts.py."""
    with pytest.raises(AccountError, match="is no name of a tenant"):
        store.accounts.create_tenant(Tenant("Owls"))
    with pytest.raises(AccountError, match="is no name of a tenant"):
        store.accounts.tenant("a\x00")
    with pytest.raises(AccountError, match="must be a number from"):
        store.accounts.change_tenant("default", weight=0.0)
    with pytest.raises(AccountError, match="tokens_a_day -1: must be"):
        store.accounts.change_tenant("default", tokens_a_day=-1)
    with pytest.raises(AccountError, match="would have expired already"):
        store.accounts.create_key(NewKey("default", Scope.READ, expires_at=now() - DAY))
    assert store.accounts.tenants() == [Tenant("default")]
    assert not store.accounts.has_keys()


def test_a_key_is_stored_as_its_hash_alone(store: Store) -> None:
    expires_at = now() + DAY
    key, record = store.accounts.create_key(
        NewKey("default", Scope.SUBMIT, "nightly run", expires_at)
    )
    assert is_key(key)
    assert (record.prefix, record.tenant, record.scope) == (key[:11], "default", Scope.SUBMIT)
    assert (record.label, record.expires_at, record.revoked_at) == ("nightly run", expires_at, None)
    with store.database.reading() as connection:
        (row,) = connection.execute(sa.select(api_key)).all()
    assert row.sha256 == digest_of(key)
    assert key[12:] not in str(row)
    known = store.accounts.known_key(record.prefix)
    assert known is not None
    assert (known.key, known.sha256, known.requests_a_minute) == (record, digest_of(key), None)
    assert store.accounts.known_key("nj_00000000") is None


def test_a_key_of_nobody_is_refused_with_what_to_do(store: Store) -> None:
    with pytest.raises(AccountError, match="no tenant 'owls'; make it by `nightjar tenants create"):
        store.accounts.create_key(NewKey("owls", Scope.READ))
    assert not store.accounts.has_keys()


def test_keys_are_listed_by_tenant(store: Store) -> None:
    store.accounts.create_tenant(Tenant("owls"))
    made = [
        store.accounts.create_key(NewKey(name, Scope.READ))[1]
        for name in ("default", "owls", "default")
    ]
    assert store.accounts.keys() == made
    assert store.accounts.keys("owls") == [made[1]]
    with pytest.raises(AccountError, match="no tenant 'bats'"):
        store.accounts.keys("bats")


def test_a_revoked_key_stays_listed_and_counts_as_a_key(store: Store) -> None:
    assert not store.accounts.has_usable_key()
    _, made = store.accounts.create_key(NewKey("default", Scope.READ))
    assert store.accounts.has_usable_key()
    assert made.state(now()) is KeyState.USABLE
    revoked = store.accounts.revoke_key(made.prefix)
    assert revoked.state(now()) is KeyState.REVOKED
    assert store.accounts.revoke_key(made.prefix) == revoked  # the moment stays
    assert (store.accounts.has_keys(), store.accounts.has_usable_key()) == (True, False)
    with pytest.raises(AccountError, match="there is no key nj_00000000"):
        store.accounts.revoke_key("nj_00000000")


def test_an_expired_key_opens_nothing(store: Store) -> None:
    _, made = store.accounts.create_key(NewKey("default", Scope.READ, expires_at=now() + DAY))
    assert made.expires_at is not None
    assert made.state(made.expires_at - timedelta(seconds=1)) is KeyState.USABLE
    assert made.state(made.expires_at) is KeyState.EXPIRED
    expire(store, made.prefix)
    assert (store.accounts.has_keys(), store.accounts.has_usable_key()) == (True, False)


def expire(store: Store, prefix: str) -> None:
    ended = sa.update(api_key).where(api_key.c.prefix == prefix).values(expires_at=now() - DAY)
    store.database.write(lambda connection: connection.execute(ended))


def test_a_rotated_key_ends_after_the_grace_time(store: Store) -> None:
    store.accounts.create_tenant(Tenant("owls"))
    _, old = store.accounts.create_key(NewKey("owls", Scope.SUBMIT, "run"))
    before = now()
    _, new = store.accounts.rotate_key(old.prefix, grace=timedelta(hours=1))
    assert (new.tenant, new.scope, new.label, new.expires_at) == ("owls", Scope.SUBMIT, "run", None)
    ends_at = store.accounts.keys()[0].expires_at
    assert ends_at is not None
    assert before + timedelta(hours=1) <= ends_at <= now() + timedelta(hours=1)


def test_a_rotation_lengthens_no_life_and_gives_the_new_key_its_own(store: Store) -> None:
    _, old = store.accounts.create_key(NewKey("default", Scope.READ, expires_at=now() + DAY))
    _, new = store.accounts.rotate_key(old.prefix, grace=timedelta(days=9))
    assert store.accounts.keys()[0].expires_at == old.expires_at
    assert old.expires_at is not None
    assert new.expires_at is not None
    assert new.expires_at - new.created_at == old.expires_at - old.created_at
    later = now() + 5 * DAY
    assert store.accounts.rotate_key(new.prefix, grace=DAY, expires_at=later)[1].expires_at == later


def test_a_key_that_has_ended_is_not_rotated(store: Store) -> None:
    _, revoked = store.accounts.create_key(NewKey("default", Scope.READ))
    store.accounts.revoke_key(revoked.prefix)
    _, expired = store.accounts.create_key(NewKey("default", Scope.READ))
    expire(store, expired.prefix)
    for prefix, state in ((revoked.prefix, "revoked"), (expired.prefix, "expired")):
        with pytest.raises(AccountError, match=f"is {state}.*`nightjar keys create`"):
            store.accounts.rotate_key(prefix, grace=DAY)
    assert len(store.accounts.keys()) == 2


def test_tenants_do_not_share_idempotency_keys(store: Store) -> None:
    jobs = {name: submit(store, name, 1, "night") for name in ("default", "owls", "bats")}
    assert len(set(jobs.values())) == 3
    for name, job_id in jobs.items():
        assert submit(store, name, 1, "night") == job_id
        assert store.jobs.get(job_id).tenant == name
    long = "k" * 255
    assert submit(store, "t" * 64, 1, long) == submit(store, "t" * 64, 1, long)
    assert stored_key("owls", "k") == stored_key("owls", "k")
    forged = stored_key("owls", "night")
    assert stored_key("default", forged) != forged


def test_the_default_tenants_keys_stand_as_earlier_versions_wrote_them(store: Store) -> None:
    job_id = submit(store, "default", 1, "night")
    with store.database.reading() as connection:
        assert connection.execute(sa.select(job.c.id, job.c.idempotency_key)).all() == [
            (job_id, "night")
        ]


def test_jobs_are_listed_by_tenant(store: Store) -> None:
    mine, theirs = submit(store, "owls", 1), submit(store, "bats", 1)
    assert [one.id for one in store.jobs.newest(tenant="owls")] == [mine]
    assert [one.id for one in store.jobs.newest(9, None, "bats")] == [theirs]
    assert store.jobs.newest(9, "job_0", "owls") == []
    assert store.jobs.newest(tenant="default") == []
    assert len(store.jobs.newest()) == 2
    assert store.jobs.tenant_of(mine) == "owls"
    assert store.jobs.tenant_of("job_0") is None


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

"""Tenants and keys in the store; what tenants do not share."""

from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from nightjar.jobs.accounts import KeyState, NewKey, Tenant, TenantLimits, digest_of, is_key
from nightjar.jobs.errors import AccountError
from nightjar.jobs.states import Scope
from nightjar.jobs.store import Store
from nightjar.jobs.store.account_tables import api_key
from nightjar.jobs.store.tables import job
from tests.jobs import submit_for as submit

pytestmark = pytest.mark.one_database

DAY = timedelta(days=1)


def now() -> datetime:
    return datetime.now(UTC)


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

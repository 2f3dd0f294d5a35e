"""Whose a key is: looked up, kept for a moment, refused."""

import asyncio
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from nightjar.jobs.accounts import ApiKey, KnownKey, NewKey, Tenant, generate_key
from nightjar.jobs.api import key_ring
from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.caller import Caller
from nightjar.jobs.api.key_ring import Access, Found, KeyRing
from nightjar.jobs.states import Scope
from nightjar.jobs.store import Store
from nightjar.jobs.store.account_tables import api_key
from nightjar.jobs.store.accounts import Accounts
from tests.clock import Clock

OWN = "a-secret-of-the-operators-own-long-enough"
ADMIN = Found(Caller("default", Scope.ADMIN))


class CountedAccounts(Accounts):
    """Counts look-ups."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.database)
        self.looked_up: list[str] = []
        self.write = lambda change: store.database.write(lambda found: found.execute(change))

    def known_key(self, prefix: str) -> KnownKey | None:
        self.looked_up.append(prefix)
        return super().known_key(prefix)


@pytest.fixture
def store(sqlite_url: str, migrated_sqlite_file: Path) -> Iterator[Store]:
    shutil.copy(migrated_sqlite_file, sqlite_url.removeprefix("sqlite:///"))
    opened = Store(sqlite_url)
    opened.accounts.create_tenant(Tenant("owls"))
    yield opened
    opened.close()


@pytest.fixture
def accounts(store: Store) -> CountedAccounts:
    return CountedAccounts(store)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(accounts: Accounts, scope: Scope = Scope.SUBMIT) -> tuple[str, ApiKey]:
    return accounts.create_key(NewKey("owls", scope))


def find(ring: KeyRing, key: str | None) -> Found:
    return asyncio.run(ring.find(key))


def refusal(ring: KeyRing, key: str | None) -> tuple[int, str]:
    with pytest.raises(RefusedRequestError) as caught:
        find(ring, key)
    return caught.value.status, caught.value.code


def test_without_a_key_anywhere_every_call_is_the_default_admins(
    accounts: CountedAccounts, clock: Clock
) -> None:
    """Clients of OpenAI's API send some key always."""
    ring = KeyRing(accounts, Access(), clock)
    assert find(ring, None) == find(ring, "sk-none") == ADMIN
    make(accounts)
    assert find(ring, None) == ADMIN  # asked a moment ago
    clock.now += key_ring.KEPT_S
    assert refusal(ring, None) == (401, "missing_api_key")


def test_the_last_key_that_ends_opens_nothing(accounts: CountedAccounts, clock: Clock) -> None:
    _, made = make(accounts)
    accounts.revoke_key(made.prefix)
    assert refusal(KeyRing(accounts, Access(), clock), None) == (401, "missing_api_key")


def test_beyond_loopback_a_key_is_needed_from_the_start(
    accounts: CountedAccounts, clock: Clock
) -> None:
    ring = KeyRing(accounts, Access(required=True), clock)
    assert refusal(ring, None) == (401, "missing_api_key")
    assert refusal(ring, "sk-none") == (401, "invalid_api_key")


def test_the_operators_own_secret_is_an_admin_key_of_the_default_tenant(
    accounts: CountedAccounts, clock: Clock
) -> None:
    ring = KeyRing(accounts, Access(OWN), clock)
    assert find(ring, OWN) == ADMIN
    assert refusal(ring, None) == (401, "missing_api_key")
    assert refusal(ring, OWN[:-1]) == (401, "invalid_api_key")
    key, _ = make(accounts)
    assert find(ring, key).caller == Caller("owls", Scope.SUBMIT)


def test_a_key_of_ours_as_the_operators_secret_gains_nothing(
    accounts: CountedAccounts, clock: Clock
) -> None:
    """A shell in which a client's key was exported starts the API."""
    key, made = make(accounts, Scope.READ)
    ring = KeyRing(accounts, Access(key), clock)
    assert find(ring, key).caller == Caller("owls", Scope.READ)
    accounts.revoke_key(made.prefix)
    clock.now += key_ring.KEPT_S
    assert refusal(ring, key) == (401, "invalid_api_key")


def test_each_refusal_costs_one_look_up(accounts: CountedAccounts, clock: Clock) -> None:
    """So that the time of an answer does not say why a key was refused."""
    ring = KeyRing(accounts, Access(), clock)
    (good, _), (revoked, one), (expired, other) = (make(accounts) for _ in range(3))
    assert find(ring, good)
    accounts.revoke_key(one.prefix)
    ended = sa.update(api_key).where(api_key.c.prefix == other.prefix)
    past = ended.values(expires_at=datetime.now(UTC) - timedelta(seconds=1))
    accounts.write(past)
    wrong = good[:-1] + ("a" if good[-1] != "a" else "b")
    accounts.looked_up.clear()
    bad = [generate_key(), revoked, expired, wrong]
    for key in bad * 2:
        assert refusal(ring, key) == (401, "invalid_api_key")
    assert accounts.looked_up == [key[:11] for key in bad] * 2


def test_a_key_is_looked_up_every_few_seconds_and_stops_then(
    accounts: CountedAccounts, clock: Clock
) -> None:
    ring = KeyRing(accounts, Access(), clock)
    key, made = make(accounts)
    for _ in range(3):
        assert find(ring, key).caller == Caller("owls", Scope.SUBMIT)
    assert accounts.looked_up == [made.prefix]
    accounts.revoke_key(made.prefix)
    clock.now += key_ring.KEPT_S - 0.01
    assert find(ring, key).caller.tenant == "owls"
    clock.now += 0.01
    assert refusal(ring, key) == refusal(ring, key) == (401, "invalid_api_key")
    assert accounts.looked_up == [made.prefix] * 3  # a refusal is not kept


def test_a_key_that_is_kept_ends_at_its_moment(
    accounts: CountedAccounts, clock: Clock, store: Store
) -> None:
    ring = KeyRing(accounts, Access(), clock)
    soon = datetime.now(UTC) + timedelta(seconds=0.4)
    key, _ = accounts.create_key(NewKey("owls", Scope.READ, expires_at=soon))
    assert find(ring, key).caller.tenant == "owls"
    while datetime.now(UTC) < soon:
        asyncio.run(asyncio.sleep(0.05))
    assert refusal(ring, key) == (401, "invalid_api_key")


def test_a_new_limit_of_the_tenant_is_noticed(accounts: CountedAccounts, clock: Clock) -> None:
    ring = KeyRing(accounts, Access(OWN), clock)
    key, _ = make(accounts)
    assert (find(ring, key).requests_a_minute, find(ring, OWN).requests_a_minute) == (None, None)
    accounts.change_tenant("owls", requests_a_minute=7)
    accounts.change_tenant("default", requests_a_minute=8)
    clock.now += key_ring.KEPT_S
    assert (find(ring, key).requests_a_minute, find(ring, OWN).requests_a_minute) == (7, 8)


def test_a_flood_of_invented_keys_leaves_the_database_alone(
    accounts: CountedAccounts, clock: Clock
) -> None:
    ring = KeyRing(accounts, Access(), clock)
    key, _ = make(accounts)
    assert find(ring, key)
    assert all(refusal(ring, f"sk-{n}")[0] == 401 for n in range(200))  # never looked up
    refused = [refusal(ring, generate_key()) for _ in range(key_ring.STRANGERS_A_SECOND + 5)]
    assert refused.count((429, "rate_limit_exceeded")) == 6  # the first key took a place, too
    assert len(accounts.looked_up) == key_ring.STRANGERS_A_SECOND
    clock.now += key_ring.KEPT_S
    assert find(ring, key).caller.tenant == "owls"  # who is known goes on


def test_keys_that_are_kept_are_bounded_in_number(
    accounts: CountedAccounts, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_ring, "MOST_KEPT", 2)
    ring = KeyRing(accounts, Access(), clock)
    keys = [make(accounts)[0] for _ in range(3)]
    for key in (keys[0], keys[1], keys[0], keys[2], keys[0]):
        find(ring, key)
    assert accounts.looked_up == [key[:11] for key in keys]
    find(ring, keys[1])
    assert accounts.looked_up[3:] == [keys[1][:11]]

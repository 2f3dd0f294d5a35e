"""Names of tenants, limits, and keys: what they may be."""

import re
from datetime import UTC, datetime, timedelta

import pytest

from nightjar.jobs.accounts import (
    ApiKey,
    KeyState,
    NewKey,
    Tenant,
    TenantLimits,
    checked_key,
    checked_tenant,
    digest_of,
    generate_key,
    has_key_inside,
    is_key,
    prefix_of,
)
from nightjar.jobs.errors import AccountError
from nightjar.jobs.states import Scope
from nightjar.jobs.store.idempotency import stored_key

NOW = datetime(2026, 11, 23, tzinfo=UTC)
SECRET = "S" * 43


@pytest.mark.parametrize("name", ["a", "a" * 64, "a.b_c-9", "0"])
def test_names_of_tenants(name: str) -> None:
    assert checked_tenant(Tenant(name)).name == name


@pytest.mark.parametrize(
    "name", ["", "Owls", "a b", "a/b", "-a", "a-", ".", "ä", "a\n", "a" * 65, "a\x00", "\ud800"]
)
def test_a_name_that_is_no_slug_is_refused(name: str) -> None:
    with pytest.raises(AccountError, match="is no name of a tenant: use 1 to 64 lower-case"):
        checked_tenant(Tenant(name))


@pytest.mark.parametrize(
    ("tenant", "fault"),
    [
        (Tenant("a", 0.0), "weight 0.0: must be a number from 0.001 to 1000"),
        (Tenant("a", 1_000.5), "weight 1000.5"),
        (Tenant("a", float("nan")), "weight nan"),
        (Tenant("a", float("inf")), "weight inf"),
        (Tenant("a", limits=TenantLimits(tokens_a_day=-1)), "tokens_a_day -1: must be a whole"),
        (Tenant("a", limits=TenantLimits(bytes_stored=2**53 + 1)), "bytes_stored 9007199254740993"),
    ],
)
def test_a_weight_or_a_limit_out_of_range_is_refused(tenant: Tenant, fault: str) -> None:
    with pytest.raises(AccountError, match=fault):
        checked_tenant(tenant)


def test_the_edges_of_weights_and_limits() -> None:
    for weight in (0.001, 1_000.0):
        assert checked_tenant(Tenant("a", weight)).weight == weight
    limits = TenantLimits(0, 2**53, None, 1)
    assert checked_tenant(Tenant("a", limits=limits)).limits == limits


@pytest.mark.parametrize(
    ("new", "fault"),
    [
        (NewKey("default", Scope.READ, "a" * 201), "the label must have at most 200"),
        (NewKey("default", Scope.READ, "a\x1b[2J"), "the label must have .* printable"),
        (NewKey("default", Scope.READ, expires_at=NOW), "would have expired already"),
    ],
)
def test_a_key_that_cannot_be_made(new: NewKey, fault: str) -> None:
    with pytest.raises(AccountError, match=fault):
        checked_key(new, NOW)
    later = NewKey("default", Scope.READ, "밤 " * 100, NOW + timedelta(microseconds=1))
    assert checked_key(later, NOW) is later


def test_no_two_keys_are_alike() -> None:
    keys = {generate_key() for _ in range(200)}
    assert len({key[:11] for key in keys}) == len({key[12:] for key in keys}) == 200
    for key in keys:
        assert re.fullmatch("nj_[a-z0-9]{8}_[A-Za-z0-9]{43}", key)
        assert is_key(key)
        assert has_key_inside(f"say {key}.")
    letters = set("".join(key[12:] for key in keys))
    assert len(letters) == 62  # 43 of 62 letters: 256 bits
    assert not is_key("nj_abcd1234")
    assert not has_key_inside("nj_abcd1234_short")
    assert digest_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_prefix_is_taken_from_the_whole_key_and_a_wrong_one_is_not_repeated() -> None:
    assert prefix_of("nj_abcd1234") == prefix_of(f"nj_abcd1234_{SECRET}") == "nj_abcd1234"
    for wrong in ("", "nj_abc", f"nj_abcd1234_{SECRET}S", f"nj_abcd1234{SECRET}", "NJ_abcd1234"):
        with pytest.raises(AccountError, match="no prefix of a key") as caught:
            prefix_of(wrong)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("expires_at", "revoked_at", "state"),
    [
        (None, None, KeyState.USABLE),
        (NOW + timedelta(microseconds=1), None, KeyState.USABLE),
        (NOW, None, KeyState.EXPIRED),
        (NOW, NOW, KeyState.REVOKED),
        (None, NOW, KeyState.REVOKED),
    ],
)
def test_what_became_of_a_key(
    expires_at: datetime | None, revoked_at: datetime | None, state: KeyState
) -> None:
    key = ApiKey("nj_abcd1234", "default", Scope.READ, "", NOW, expires_at, revoked_at)
    assert key.state(NOW) is state


def test_idempotency_keys_of_tenants_are_told_apart() -> None:
    assert stored_key("default", "night") == "night"
    assert stored_key("default", None) is stored_key("owls", None) is None
    stored = {stored_key(tenant, "night") for tenant in ("default", "owls", "bats")}
    assert len(stored) == 3
    longest = stored_key("t" * 64, "k" * 255)
    assert longest is not None
    assert len(longest) <= 255
    forged = stored_key("owls", "night")
    assert stored_key("default", forged) != forged

"""Tenants and their keys as records, and what a name, a limit and a key may be."""

import hashlib
import math
import re
import secrets
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum

from nightjar.jobs.errors import AccountError
from nightjar.jobs.purge_records import LEAST_KEPT_S, MOST_KEPT_S
from nightjar.jobs.states import Scope

PREFIX_LENGTH = len("nj_") + 8
LONGEST_LABEL = 200
MOST = 2**53  # the largest limit: JSON's numbers are exact up to it
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1_000.0

_SLUG = re.compile(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")
_KEY = re.compile(r"nj_[a-z0-9]{8}_[A-Za-z0-9]{43}")
_PREFIX = re.compile(r"nj_[a-z0-9]{8}")
_PREFIX_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_SECRET_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ" + _PREFIX_LETTERS
_SECRET_LENGTH = 43  # of 62 letters: 256 bits


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """How much a tenant may use; None for any amount."""

    requests_a_minute: int | None = None
    tokens_a_day: int | None = None
    rows_waiting: int | None = None
    bytes_stored: int | None = None
    keep_results_s: int | None = None  # None: as long as the deployment says


LIMIT_NAMES = tuple(one.name for one in fields(TenantLimits))


@dataclass(frozen=True, slots=True)
class Tenant:
    """Somebody whose jobs nobody else sees."""

    name: str
    weight: float = 1.0  # its share of the computed tokens beside other tenants that have work
    limits: TenantLimits = field(default=TenantLimits())
    created_at: datetime | None = None  # None for `default` while nothing of it was changed


class KeyState(StrEnum):
    """Whether a key opens the API."""

    USABLE = "usable"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key to be made; filled by the operator's command."""

    tenant: str
    scope: Scope
    label: str = ""
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is stored: without its secret. Filled by the store."""

    prefix: str
    tenant: str
    scope: Scope
    label: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None

    def state(self, at: datetime) -> KeyState:
        """Whether the key opens the API at a moment."""
        if self.revoked_at is not None:
            return KeyState.REVOKED
        has_ended = self.expires_at is not None and self.expires_at <= at
        return KeyState.EXPIRED if has_ended else KeyState.USABLE


@dataclass(frozen=True, slots=True)
class KnownKey:
    """What authentication needs of a stored key; filled by the store."""

    key: ApiKey
    sha256: str
    requests_a_minute: int | None  # of its tenant


def generate_key() -> str:
    """A new key: `nj_`, 8 characters by which people recognise it, and 256 random bits."""
    prefix = "".join(secrets.choice(_PREFIX_LETTERS) for _ in range(8))
    secret = "".join(secrets.choice(_SECRET_LETTERS) for _ in range(_SECRET_LENGTH))
    return f"nj_{prefix}_{secret}"


def digest_of(key: str) -> str:
    """The SHA-256 of a whole key, as it is stored.

    A slow hash protects passwords, because people choose passwords that can be guessed. A key has
    256 random bits: nobody can try them all, however fast one try is. So a fast hash is enough, and
    each call of the API can afford it.
    """
    return hashlib.sha256(key.encode()).hexdigest()


def is_key(text: str) -> bool:
    """Whether it has the shape of a key that `generate_key` makes."""
    return _KEY.fullmatch(text) is not None


def has_key_inside(text: str) -> bool:
    """Whether a key that `generate_key` makes stands anywhere in the text."""
    return _KEY.search(text) is not None


def prefix_of(text: str) -> str:
    """The prefix of a key, from that prefix or from the whole key; raises AccountError."""
    prefix = text[:PREFIX_LENGTH]
    if _PREFIX.fullmatch(prefix) is None or (text != prefix and not is_key(text)):
        # Not the text: it may be a key with a typing error.
        raise AccountError(
            "that is no prefix of a key; it begins with nj_ and 8 characters, such as nj_k3x09ab7 "
            "(`nightjar keys list` shows them)"
        )
    return prefix


def checked_tenant(tenant: Tenant) -> Tenant:
    """The tenant itself; raises AccountError unless name, weight and limits can be used."""
    if _SLUG.fullmatch(tenant.name) is None:
        raise AccountError(
            f"{tenant.name[:80]!r} is no name of a tenant: use 1 to 64 lower-case letters, digits, "
            "'-', '_' and '.', with a letter or digit at both ends"
        )
    if not (math.isfinite(tenant.weight) and LEAST_WEIGHT <= tenant.weight <= MOST_WEIGHT):
        raise AccountError(
            f"weight {tenant.weight}: must be a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}"
        )
    for name in LIMIT_NAMES:
        limit = getattr(tenant.limits, name)
        if limit is not None and not 0 <= limit <= MOST:
            raise AccountError(f"{name} {limit}: must be a whole number from 0 to {MOST}, or none")
    keep_s = tenant.limits.keep_results_s
    if keep_s is not None and not LEAST_KEPT_S <= keep_s <= MOST_KEPT_S:
        raise AccountError(
            f"keep_results_s {keep_s}: must be from {LEAST_KEPT_S} (1 hour) to {MOST_KEPT_S} "
            "(36500 days), or none"
        )
    return tenant


def checked_key(new: NewKey, at: datetime) -> NewKey:
    """The new key itself; raises AccountError unless its label and expiry can be used."""
    if len(new.label) > LONGEST_LABEL or (new.label and not new.label.isprintable()):
        raise AccountError(f"the label must have at most {LONGEST_LABEL} printable characters")
    if new.expires_at is not None and new.expires_at <= at:
        raise AccountError("the key would have expired already; give a later moment")
    return new

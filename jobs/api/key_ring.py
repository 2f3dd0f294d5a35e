"""Which caller a key belongs to, looked up in the store and kept for a few seconds.

A key that is revoked, or whose tenant's limits change, is noticed KEPT_S later at most. Only keys
that open the API are kept: all others cost the same look-up each time, so that the time of an
answer does not say why a key was refused.
"""

import hmac
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from fastapi.concurrency import run_in_threadpool

from nightjar.jobs.accounts import KeyState, KnownKey, digest_of, is_key, prefix_of
from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.caller import Caller
from nightjar.jobs.api.rate_limits import TokenBucket
from nightjar.jobs.errors import StoreError
from nightjar.jobs.records import DEFAULT_TENANT
from nightjar.jobs.states import Scope
from nightjar.jobs.store.accounts import Accounts

KEPT_S = 5.0
MOST_KEPT = 10_000
# Look-ups a second of keys that are not kept: a flood of invented keys leaves the database alone.
STRANGERS_A_SECOND = 100
_NO_DIGEST = "0" * 64
_LONGEST_KEY = 512


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call, beside those whose keys are stored.

    Attributes:
        api_key: A secret of the operator's own, which is an admin key of the default tenant. One
            that `nightjar keys` made is looked up like any other.
        required: Whether a key is needed in any case.
        counts: Whether requests are counted here, for the limit of requests a minute.
    """

    api_key: str | None = field(default=None, repr=False)
    required: bool = False
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Found:
    """A caller, and how many requests a minute its tenant may send; None for any number."""

    caller: Caller
    requests_a_minute: int | None = None


class KeyRing:
    """Finds callers by their keys.

    Where no key is needed, every call is the default tenant's, with all rights. A key is needed
    as soon as one was ever made (be it expired or revoked: the last one that ends must not open the
    API to all), or `access` says so.
    """

    def __init__(
        self, accounts: Accounts, access: Access, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._accounts = accounts
        api_key = access.api_key
        own = api_key if api_key is not None and not is_key(api_key) else None
        self._own_digest = None if own is None else digest_of(own)
        self._needed = access.required or api_key is not None
        self._clock = clock
        self._asked_at = -KEPT_S
        self._strangers = TokenBucket(STRANGERS_A_SECOND, 1.0, clock)
        self._kept: OrderedDict[str, tuple[KnownKey, float]] = OrderedDict()
        self._limit_of_default: int | None = None
        self._limit_read_at = -KEPT_S

    async def find(self, key: str | None) -> Found:
        """The caller that the key belongs to.

        Raises:
            RefusedRequestError: There is no key where one is needed, or it is not valid, or too
                many unknown keys have come.
            StoreError: The key could not be looked up.
        """
        if not await self.is_needed():
            return await self._default_admin()
        if key is None:
            raise RefusedRequestError(
                401,
                "missing_api_key",
                "this API needs a key; send it as the header 'Authorization: Bearer KEY' (whoever "
                "runs the API makes one by `nightjar keys create`)",
            )
        if len(key) > _LONGEST_KEY:
            raise _invalid()
        return await self.find_digest(digest_of(key), _prefix(key))

    async def find_digest(self, digest: str, prefix: str | None) -> Found:
        """The caller of the key that has this digest, as a session of a browser keeps it.

        `prefix` is that of the key; None for a key that no `nightjar keys create` made. Raises as
        `find` does.
        """
        if self._is_own(digest):
            return await self._default_admin()
        found = None if prefix is None else await self._look_up(prefix, digest)
        if found is None:
            raise _invalid()
        caller = Caller(found.key.tenant, found.key.scope, found.key.prefix)
        return Found(caller, found.requests_a_minute)

    async def may_read(self, key: str | None, *, has_store: bool) -> bool:
        """Whether the key may read, or none is needed; for what is answered to strangers as well.

        Without the store (`has_store` is false) only the operator's own secret is known to be one,
        and a key is needed if it was before.
        """
        if key is not None and len(key) <= _LONGEST_KEY and self._is_own(digest_of(key)):
            return True
        if not has_store:
            return not self._needed
        try:
            return (await self.find(key)).caller.may(Scope.READ)
        except RefusedRequestError:
            return False
        except StoreError:
            return not self._needed

    def _is_own(self, digest: str) -> bool:
        own = self._own_digest
        return own is not None and hmac.compare_digest(digest, own)

    async def is_needed(self) -> bool:
        """Whether callers need a key; that it is needed once stays so."""
        asked_at = self._clock()
        if not self._needed and asked_at - self._asked_at >= KEPT_S:
            if await run_in_threadpool(self._accounts.has_keys):  # never back to False
                self._needed = True
            self._asked_at = asked_at
        return self._needed

    async def _default_admin(self) -> Found:
        read_at = self._clock()
        if read_at - self._limit_read_at >= KEPT_S:
            tenant = await run_in_threadpool(self._accounts.tenant, DEFAULT_TENANT)
            self._limit_of_default = tenant.limits.requests_a_minute
            self._limit_read_at = read_at
        return Found(Caller(), self._limit_of_default)

    async def _look_up(self, prefix: str, digest: str) -> KnownKey | None:
        """The stored key, if it is this one and opens the API now."""
        looked_at, kept = self._clock(), self._kept.get(digest)
        if kept is not None and looked_at - kept[1] < KEPT_S:
            self._kept.move_to_end(digest)
            return kept[0] if _opens(kept[0], digest) else None
        if kept is None and self._strangers.take().retry_after_s:
            message = "too many calls with unknown keys; try again in a second"
            raise RefusedRequestError(429, "rate_limit_exceeded", message)
        known = await run_in_threadpool(self._accounts.known_key, prefix)
        opens = _opens(known, digest)  # first, so that an unknown key takes as long
        if known is None or not opens:
            self._kept.pop(digest, None)
            return None
        self._kept[digest] = (known, looked_at)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return known


def _prefix(key: str) -> str | None:
    """The prefix of a key; None for a text that has not its shape, which is no secret."""
    return prefix_of(key) if is_key(key) else None


def _opens(known: KnownKey | None, digest: str) -> bool:
    """Whether it is the key of this digest, and usable; takes the same time in each case."""
    stored = _NO_DIGEST if known is None else known.sha256
    is_same = hmac.compare_digest(digest, stored)
    state = KeyState.REVOKED if known is None else known.key.state(datetime.now(UTC))
    return is_same and state is KeyState.USABLE


def _invalid() -> RefusedRequestError:
    message = (
        "this API key is not valid: it is unknown, expired or revoked; ask whoever runs the API "
        "for another (`nightjar keys create`)"
    )
    return RefusedRequestError(401, "invalid_api_key", message)

"""Who calls the API, and what they may do."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.records import DEFAULT_TENANT
from nightjar.jobs.states import Scope

_ORDER = list(Scope)


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant that a call is made for, and the scope of its key.

    key: The prefix of the key; None without a key, or for the operator's own secret.
    """

    tenant: str = DEFAULT_TENANT
    scope: Scope = Scope.ADMIN
    key: str | None = field(default=None, compare=False)

    @property
    def actor(self) -> str:
        """Who calls, for records of changes."""
        return "the API" if self.key is None else f"key {self.key}"

    def may(self, scope: Scope) -> bool:
        """Whether the key allows what needs this scope."""
        return _ORDER.index(self.scope) >= _ORDER.index(scope)


def caller_of(request: Request) -> Caller:
    """The caller that authentication found; without authentication, the machine's own user."""
    found: Caller = getattr(request.state, "caller", Caller())
    return found


def needs(scope: Scope) -> Callable[[Request], Awaitable[Caller]]:
    """A FastAPI dependency: the caller, if the scope of the key suffices."""

    async def check(request: Request) -> Caller:  # not in a thread: it does not wait
        caller = caller_of(request)
        if not caller.may(scope):
            raise scope_too_small(scope)
        return caller

    return check


def scope_too_small(needed: Scope) -> RefusedRequestError:
    """The refusal of a key whose scope does not include this one."""
    message = f"this call needs a key of the scope {needed.value!r}"
    return RefusedRequestError(403, "scope_too_small", message)


Reader = Annotated[Caller, Depends(needs(Scope.READ))]
"""The type of a route's parameter: the caller, whose key may read."""
Administrator = Annotated[Caller, Depends(needs(Scope.ADMIN))]
"""The caller, whose key may do everything."""
Submitter = Annotated[Caller, Depends(needs(Scope.SUBMIT))]
"""The caller, whose key may submit and steer work."""

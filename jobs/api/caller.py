"""Who calls the API, and what they may do."""

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request

from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.records import DEFAULT_TENANT
from nightjar.jobs.states import Scope

_ORDER = list(Scope)


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant that a call is made for, and the scope of its key."""

    tenant: str = DEFAULT_TENANT
    scope: Scope = Scope.ADMIN

    def may(self, scope: Scope) -> bool:
        """Whether the key allows what needs this scope."""
        return _ORDER.index(self.scope) >= _ORDER.index(scope)


def caller_of(request: Request) -> Caller:
    """The caller that authentication found; without authentication, the machine's own user."""
    found: Caller = getattr(request.state, "caller", Caller())
    return found


def needs(scope: Scope) -> Callable[[Request], Caller]:
    """A FastAPI dependency: the caller, if the scope of the key suffices."""

    def check(request: Request) -> Caller:
        caller = caller_of(request)
        if not caller.may(scope):
            message = f"this call needs a key of the scope {scope.value!r}"
            raise RefusedRequestError(403, "scope_too_small", message)
        return caller

    return check

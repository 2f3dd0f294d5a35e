"""Finds out who calls: every request passes here before any route, so no route can forget it.

Open to strangers are the paths of OPEN_PATHS alone. All others need a key, where keys are in use
(`jobs/api/key_ring.py`). The tenant comes from the key and from nothing else: headers such as
`OpenAI-Organization` or `X-Tenant` are not read.
"""

from collections.abc import Awaitable, Callable
from urllib.parse import parse_qsl

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nightjar.jobs.accounts import has_key_inside
from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.caller import scope_too_small
from nightjar.jobs.api.errors import answer_error, error_answer
from nightjar.jobs.api.key_ring import Found, KeyRing
from nightjar.jobs.api.rate_limits import Allowance, RateLimits
from nightjar.jobs.errors import JobError
from nightjar.jobs.states import Scope as KeyScope

OPEN_PATHS = frozenset({"/health", "/docs", "/openapi.json"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_KEY_NAMES = frozenset(
    {"accesstoken", "apikey", "authorization", "bearer", "key", "token", "xapikey"}
)


class Authentication:
    """Sets `request.state.caller`, or refuses the request.

    `rates` counts the requests of each tenant; None counts them nowhere, for a process to which
    another one hands on what it has counted.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, rates: RateLimits | None) -> None:
        self._app = app
        self._keys = keys
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refusal, or hand the request on with its caller."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no route is one of these, and none shall be by mistake
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            _refuse_key_in_address(scope)
            found = None if _is_open(scope) else await self._keys.find(_bearer(scope))
        except JobError as error:
            await _refusal(error, scope)(scope, receive, send)
            return
        if found is None:
            await self._app(scope, receive, send)
            return
        app, allowance = self._app, self._count(found)
        if allowance is not None:
            send = _with_headers(send, allowance)
        needed = KeyScope.READ if scope["method"] in SAFE_METHODS else KeyScope.SUBMIT
        if allowance is not None and allowance.retry_after_s:
            app = _too_many(allowance)
        elif not found.caller.may(needed):
            app = _refusal(scope_too_small(needed), scope)
        scope.setdefault("state", {})["caller"] = found.caller
        await app(scope, receive, send)

    def _count(self, found: Found) -> Allowance | None:
        if self._rates is None or found.requests_a_minute is None:
            return None
        return self._rates.take(found.caller.tenant, found.requests_a_minute)


def reading_check(keys: KeyRing) -> Callable[[Request, bool], Awaitable[bool]]:
    """A check for routes that are open: may the sender of the request read?

    The flag says whether the store answers (`KeyRing.may_read`).
    """

    async def may_read(request: Request, has_store: bool) -> bool:
        try:
            key = _bearer(request.scope)
        except RefusedRequestError:
            return False
        return await keys.may_read(key, has_store=has_store)

    return may_read


def _refusal(error: JobError, scope: Scope) -> JSONResponse:
    answer = answer_error(Request(scope), error)
    if answer.status_code == 401:
        is_invalid = getattr(error, "code", "") == "invalid_api_key"
        reason = ', error="invalid_token"' if is_invalid else ""
        answer.headers["WWW-Authenticate"] = f'Bearer realm="nightjar"{reason}'
    if answer.status_code == 429:
        answer.headers["Retry-After"] = "1"
    return answer


def _is_open(scope: Scope) -> bool:
    return scope["path"] in OPEN_PATHS and scope["method"] in SAFE_METHODS


def _bearer(scope: Scope) -> str | None:
    """The key of the header Authorization, None without one; raises RefusedRequestError."""
    given = {value.strip() for value in Headers(scope=scope).getlist("authorization")}
    if len(given) > 1:
        message = "the request has several keys; send one header Authorization"
        raise RefusedRequestError(400, "several_api_keys", message, "Authorization")
    if not given:
        return None
    scheme, _, key = given.pop().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _refuse_key_in_address(scope: Scope) -> None:
    """Raise RefusedRequestError for a key in the address, where proxies and logs keep it."""
    if has_key_inside(scope["path"]) or _holds_key(scope["query_string"]):
        raise RefusedRequestError(
            400,
            "api_key_in_query",
            "an address is no place for a key: proxies and logs keep it; send the header "
            "'Authorization: Bearer KEY', and revoke the key that was sent "
            "(`nightjar keys revoke`)",
        )


def _holds_key(query: bytes) -> bool:
    if not query:
        return False
    text = query.decode("latin-1")
    pairs = parse_qsl(text, keep_blank_values=True)
    named = any(name.lower().replace("-", "").replace("_", "") in _KEY_NAMES for name, _ in pairs)
    return named or has_key_inside(text) or any(has_key_inside(f"{k} {v}") for k, v in pairs)


def _with_headers(send: Send, allowance: Allowance) -> Send:
    """Send on, with what is left of the tenant's requests in the headers of the answer."""

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in allowance.headers().items():
                headers[name] = value
        await send(message)

    return told


def _too_many(allowance: Allowance) -> JSONResponse:
    message = (
        f"this tenant may send {allowance.limit} requests a minute; try again in "
        f"{allowance.retry_after_s:.1f} s"
    )
    return error_answer(429, "rate_limit_exceeded", message)

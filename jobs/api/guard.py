"""Keeps browsers out that a foreign page makes call the API, which listens where only they get.

A page on the internet cannot read what another host answers, but it can send. Two checks stop it.
Its own name may resolve to a loopback address, so the `Host` has to be one of ours. And a call
that changes something must not come from another origin.
"""

import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from nightjar.jobs.api.errors import error_answer

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_FOREIGN_SITES = frozenset({"cross-site", "same-site"})
# What nobody can register: an address, a name without a dot (a service of Compose), localhost.
_OURS = re.compile(r"\d{1,3}(\.\d{1,3}){3}|\[[0-9a-f:.]+\]|[a-z0-9_-]+|([a-z0-9_-]+\.)+localhost")
_PORT = re.compile(r":\d{1,5}$")


class BrowserGuard:
    """Refuses requests for other hosts, and changes that come from other origins.

    `hosts` are the names beside our own under which the API is reached; `*` for any.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refusal, or hand the request on."""
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        authority = headers.get("host", "").lower()
        host = _PORT.sub("", authority)
        if authority and not self._is_ours(host):
            message = (
                f"the host {host[:255]!r} is not known here; add it to NIGHTJAR_TRUSTED_HOSTS, "
                "or call the API by its address"
            )
            return error_answer(421, "untrusted_host", message, "Host")
        if scope["method"] not in _SAFE_METHODS and self._is_foreign(headers, authority):
            message = (
                "this call comes from a page of another origin, and nothing was changed; call "
                "the API from its own origin, or without a browser"
            )
            return error_answer(403, "foreign_origin", message, "Origin")
        return None

    def _is_ours(self, host: str) -> bool:
        known = host in self._hosts or "*" in self._hosts
        return known or _OURS.fullmatch(host) is not None

    def _is_foreign(self, headers: Headers, authority: str) -> bool:
        """Whether a browser says that a page of another origin sends this."""
        sender = headers.get("origin") or headers.get("referer")
        if sender is None:
            # No browser: one names the origin of every call that may change something.
            return headers.get("sec-fetch-site", "").lower() in _FOREIGN_SITES
        try:
            origin = urlsplit(sender.lower()).netloc
        except ValueError:
            return True
        # Behind a proxy the host that a page was loaded from may be another than ours.
        return origin != authority and _PORT.sub("", origin) not in self._hosts

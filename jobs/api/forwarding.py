"""Uploads handed on to another process, which takes them with the same application.

Reading rows keeps Python's lock; in a process of its own it keeps no status poll waiting.
"""

import asyncio
import time
from pathlib import Path
from typing import Protocol

import httpx
from fastapi import Request, Response

from nightjar.jobs.api.body import (
    RefusedRequestError,
    UploadLimits,
    read_body,
    refuse_too_large,
)
from nightjar.jobs.tracing import current_traceparent

START_S = 30.0  # so long the other process may take to start, or to start again
_RETRY_S = 0.1
_GONE_S = 2.0  # so long a process that was killed may take to be gone
_LOOK_S = 0.02
# The other process finds out by itself who calls.
_HEADERS = frozenset(
    {
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",  # of a form it names the boundary
        b"idempotency-key",
    }
)
_ANSWERED_HEADERS = ("retry-after", "www-authenticate", "x-should-retry")
_TO_JOBS = "/v1/jobs"


class UploadTaker(Protocol):
    """The other process, as the API sees it."""

    @property
    def socket(self) -> Path:
        """The unix socket where it takes uploads."""

    @property
    def ends(self) -> int:
        """How often it has ended and been started again."""

    def trouble(self) -> str | None:
        """Why it takes none, in words for an operator; None while it does, or soon will."""


class UploadForwarder:
    """Sends the bodies of uploads of jobs and files through a unix socket, as they arrive."""

    def __init__(self, taker: UploadTaker, limits: UploadLimits) -> None:
        self._taker = taker
        self._limits = limits
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                uds=str(taker.socket),
                # A connection each: one that was kept may be that of a process that has ended.
                limits=httpx.Limits(max_keepalive_connections=0),
            ),
            timeout=httpx.Timeout(None),  # a job may wait for its place, and for the database
            trust_env=False,
        )

    async def forward(self, request: Request) -> Response:
        """The other process's answer.

        Raises:
            RefusedRequestError: The body is too long or stalls, or the other process is gone.
        """
        refuse_too_large(request.headers, self._limits)
        ends = self._taker.ends
        try:
            answer = await self._send(request)
        except httpx.ConnectError as error:
            raise RefusedRequestError(
                503,
                "uploads_unavailable",
                f"the process that takes uploads did not start in {START_S:.0f} s; GET /health "
                "and the API's log say more",
            ) from error
        except httpx.TransportError as error:
            await self._until_gone(ends)
            message = "the process that takes uploads has ended; send it again"
            if request.url.path == _TO_JOBS:
                message += ", best with an Idempotency-Key"
            raise RefusedRequestError(503, "upload_lost", message) from error
        told = {name: answer.headers[name] for name in _ANSWERED_HEADERS if name in answer.headers}
        return Response(answer.content, answer.status_code, told, media_type="application/json")

    async def _until_gone(self, ends: int) -> None:
        """Whoever sends again at once must not meet the socket of the process that is ending."""
        deadline = time.monotonic() + _GONE_S
        while self._taker.ends == ends and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)

    async def _send(self, request: Request) -> httpx.Response:
        path, query = request.url.path, request.url.query.encode()
        url = httpx.URL("http://uploads", path=path, query=query)
        # As bytes: senders need not keep to ASCII.
        headers = [(name, value) for name, value in request.headers.raw if name in _HEADERS]
        if (traceparent := current_traceparent()) is not None:
            headers.append((b"traceparent", traceparent.encode()))
        deadline = time.monotonic() + START_S
        while True:
            try:
                # Nothing of the body has been read when there is no connection.
                body = read_body(request, self._limits)
                return await self._client.post(url, content=body, headers=headers)
            except httpx.ConnectError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)

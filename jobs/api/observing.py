"""Tells how long answers take, by route."""

import time
from collections.abc import Callable

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nightjar.jobs.api.caller import Administrator

Observe = Callable[[str, str, str, float], None]
"""Takes the method, the route's template, the class of the status and seconds."""

ReadMetrics = Callable[[str | None], bytes]
"""Gives the metrics; its argument is the header Authorization of who asks."""

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
EXAMPLE = "# TYPE nightjar_open_jobs gauge\nnightjar_open_jobs 3.0\n"
NO_ROUTE = "none"


class Observing:
    """Times each request until its answer begins: a job that is followed answers for hours."""

    def __init__(self, app: ASGIApp, observe: Observe) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on, and tell how long it took."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in _METHODS else "other"
                # The template: an address itself has an id in it.
                route = getattr(scope.get("route"), "path", NO_ROUTE)
                status = f"{message['status'] // 100}xx"
                self._observe(method, route, status, time.perf_counter() - started)
            await send(message)

        await self._app(scope, receive, told)


def no_metrics(_: str | None) -> bytes:
    """Return the metrics of a process that records none."""
    return b""


def metrics_router(read: ReadMetrics) -> APIRouter:
    """`GET /metrics`."""
    router = APIRouter(tags=["deployment"])

    @router.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {"schema": {"type": "string"}, "example": EXAMPLE}}}
        },
    )
    async def metrics(request: Request, _: Administrator) -> Response:
        """Metrics of this process and of the whole deployment, in Prometheus's text format.

        Where keys are in use, a key of the scope `admin` is needed.
        """
        text = await run_in_threadpool(read, request.headers.get("authorization"))
        return Response(text, media_type=METRICS_TYPE)

    return router

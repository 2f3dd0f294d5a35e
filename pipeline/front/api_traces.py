"""A span for each request of the API that came past authentication."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nightjar.pipeline.tracing.tracer import Traces


class Tracing:
    """Honours the caller's `traceparent`; the span's name is the method and the route's template.

    It lies inside of authentication, so that no stranger makes spans.
    """

    def __init__(self, app: ASGIApp, traces: Traces) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on inside a span."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._traces.root(scope["method"], Headers(scope=scope).get("traceparent")) as span:

            async def told(message: Message) -> None:
                if span is not None and message["type"] == "http.response.start":
                    route = getattr(scope.get("route"), "path", "none")
                    span.update_name(f"{scope['method']} {route}")
                    span.set_attribute("http.request.method", scope["method"])
                    span.set_attribute("http.route", route)
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            await self._app(scope, receive, told)

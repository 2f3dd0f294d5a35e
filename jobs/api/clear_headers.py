"""Refuses requests whose headers can be read in two ways.

A proxy in front may read the other one: it would see another request than the one that is answered.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from nightjar.jobs.api.errors import error_answer

# Headers that decide how a body is read, or that name a job. HTTP allows each of them once.
_SINGLE = (b"content-type", b"content-encoding", b"content-length", b"idempotency-key")


class ClearHeaders:
    """Lets a request through if it has one length, and no header twice that may come once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refusal, or hand the request on."""
        fault = _fault(scope["headers"]) if scope["type"] == "http" else None
        if fault is None:
            await self._app(scope, receive, send)
            return
        code, message, name = fault
        answer = error_answer(400, code, message, name)
        # What follows on this connection may be a part of the body.
        answer.headers["Connection"] = "close"
        await answer(scope, receive, send)


def _fault(headers: list[tuple[bytes, bytes]]) -> tuple[str, str, str] | None:
    """The code, the message and the header of a refusal; None where nothing is unclear."""
    names = [name for name, _ in headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        message = "the request has Content-Length and Transfer-Encoding; send one of them"
        return "ambiguous_length", message, "Content-Length"
    for name in _SINGLE:
        if names.count(name) > 1:
            shown = name.decode().title()
            return "repeated_header", f"the request has {shown} several times; send one", shown
    return None

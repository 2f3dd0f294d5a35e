"""One HTTP connection of the API: uvicorn's, with time limits and errors in OpenAI's shape.

Uvicorn waits for a request's head for as long as its sender likes. It reads the rest of a body that
was refused to its end, and keeps an answer for a client that reads nothing. Here each has a limit,
so that nobody holds a connection for nothing.
"""

import asyncio
import json
from enum import Enum
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from nightjar.jobs.lines.error_shape import error_payload

HEAD_S = 30.0  # from the connection, or the last answer, to the end of a request's head
REST_S = 30.0  # for the rest of a body that was answered already: its sender may not read before
READER_S = 120.0  # in which a reader has to take some 50 KB of an answer

_NO_HTTP = (
    "this is no valid HTTP/1.1: its first line, a header, Content-Length or a chunk is broken, or "
    "the headers are too long"
)


class _Waits(Enum):
    """What a connection waits for, under a time limit."""

    FOR_HEAD = "head"
    FOR_REST = "rest of an answered request"


class ApiProtocol(H11Protocol):
    """A connection that is closed when its sender takes too long."""

    head_s: ClassVar[float] = HEAD_S
    rest_s: ClassVar[float] = REST_S

    reader_s: ClassVar[float] = READER_S

    _waits: _Waits | None = None
    _timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take what has arrived."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the time limits."""
        self._wait_for(None)
        self._stop_reader_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Begin to wait for a reader who is slower than the answer."""
        super().pause_writing()
        self._reader_timer = self.loop.call_later(self.reader_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on writing: the reader has taken something."""
        super().resume_writing()
        self._stop_reader_timer()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; uvicorn's own words are plain text."""
        self._refuse(400, "invalid_http", _NO_HTTP)

    def _should_upgrade(self) -> bool:
        """Answer requests for another protocol as plain HTTP, and log no advice about it."""
        return False

    def _watch(self) -> None:
        """Set the time limit of what the connection waits for now."""
        state = self.conn.their_state
        if self.transport.is_closing():
            self._wait_for(None)
        elif state is h11.IDLE:
            self._wait_for(_Waits.FOR_HEAD)
        elif state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete:
            self._wait_for(_Waits.FOR_REST)
        else:
            self._wait_for(None)

    def _wait_for(self, waits: _Waits | None) -> None:
        if waits is self._waits:
            return
        self._waits = waits
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if waits is _Waits.FOR_HEAD:
            self._timer = self.loop.call_later(self.head_s, self._too_late)
        elif waits is _Waits.FOR_REST and self.rest_s:
            self._timer = self.loop.call_later(self.rest_s, self._too_late)
        elif waits is _Waits.FOR_REST:
            self.transport.close()

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _too_late(self) -> None:
        if self.transport.is_closing():
            return
        if self._waits is _Waits.FOR_REST:
            self.transport.close()
        elif self.conn.trailing_data[0]:
            message = f"the head of the request took longer than {self.head_s:g} s"
            self._refuse(408, "request_too_slow", message)
        else:  # nothing was sent, so nothing is answered
            self.transport.close()

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer an error, where none was begun, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error_payload(status, code, message)).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            reason = STATUS_PHRASES[status]
            for event in (
                h11.Response(status_code=status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            # Whoever reads the body learns that no more of it comes, and answers nothing.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


class UploadProtocol(ApiProtocol):
    """A connection from the API itself, which relays an early refusal only when this one closes."""

    rest_s: ClassVar[float] = 0.0

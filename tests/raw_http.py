"""Requests as bytes on a socket, broken ones too, and what comes back."""

import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_MOST_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """One answer: its status, and its body; 0 and b"" where the connection was closed."""

    status: int
    body: bytes

    def error(self) -> dict[str, Any]:
        """The error, which has OpenAI's shape."""
        found: dict[str, Any] = json.loads(self.body)["error"]
        assert found.keys() == {"message", "type", "param", "code"}
        assert isinstance(found["message"], str)
        return found


def raw_request(
    path: str,
    body: bytes = b"",
    *,
    method: str = "POST",
    kind: str | None = "application/json",
    headers: Sequence[str] = (),
    length: int | None = -1,
) -> bytes:
    """A request; `length` is what its Content-Length says, -1 for the truth, None for none."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
    if kind is not None:
        lines.append(f"Content-Type: {kind}")
    if length is not None:
        lines.append(f"Content-Length: {len(body) if length < 0 else length}")
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + body


def form(parts: Iterable[tuple[bytes, bytes]], boundary: bytes = b"b") -> bytes:
    """A multipart form of (headers, data)."""
    body = b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, *part) for part in parts)
    return body + b"--%b--\r\n" % boundary


def connect(url: str, timeout_s: float = 20.0) -> socket.socket:
    """A connection to the server of a URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 80), timeout_s)


def exchange(url: str, sent: bytes, *, shut: bool = False) -> list[RawAnswer]:
    """Send these bytes, and read until the server closes: every answer, the informational ones too.

    shut: End the sending side, as a client does that breaks off.
    """
    with connect(url) as connection:
        try:
            connection.sendall(sent)
            if shut:
                connection.shutdown(socket.SHUT_WR)
        except OSError:  # refused before it was sent
            pass
        return read_answers(connection)


def read_answers(connection: socket.socket) -> list[RawAnswer]:
    """Read until the server closes, or resets after it has answered; raises TimeoutError."""
    data = bytearray()
    try:
        while len(data) < _MOST_BYTES and (piece := connection.recv(65536)):
            data += piece
    except ConnectionError:
        pass
    return list(_answers(bytes(data)))


def _answers(data: bytes) -> Iterable[RawAnswer]:
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        assert first.startswith(b"HTTP/1."), first
        headers = dict(line.lower().split(b": ", 1) for line in lines)
        size = int(headers.get(b"content-length", b"0"))
        yield RawAnswer(int(first.split()[1]), rest[:size])
        data = rest[size:]

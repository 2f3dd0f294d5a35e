"""Real HTTP servers that take webhooks, as well or as badly as a test asks for."""

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CERTIFICATE = Path(__file__).parent / "certificates" / "receiver.pem"


@dataclass
class Received:
    """One request, as it came."""

    path: str
    headers: dict[str, str]
    body: bytes


Answer = Callable[["Handler"], None]


def answer_status(status: int, body: bytes = b"ok", **headers: str) -> Answer:
    """Answer with a status, headers and a body."""

    def answer(handler: "Handler") -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def answer_slowly(pause_s: float, seconds: float) -> Answer:
    """Answer with a header a pause, so that each read succeeds and the whole never ends."""

    def answer(handler: "Handler") -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            handler.wfile.write(b"x-more: y\r\n")
            handler.wfile.flush()
            time.sleep(pause_s)

    return answer


def answer_hugely(handler: "Handler") -> None:
    """Answer with a body that has no end; `sent` counts its bytes."""
    handler.send_response(200)
    handler.end_headers()
    piece = b"x" * 65_536
    while True:
        handler.wfile.write(piece)
        handler.server.receiver.sent += len(piece)


@dataclass
class Receiver:
    """A running server: what it got, and how it answers."""

    answer: Answer = field(default_factory=lambda: answer_status(200))
    received: list[Received] = field(default_factory=list)
    sent: int = 0
    port: int = 0
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/hook?a=b"

    def bodies(self) -> list[bytes]:
        return [one.body for one in self.received]


class Server(ThreadingHTTPServer):
    receiver: Receiver
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that hang up are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.receiver.received.append(Received(self.path, headers, body))
        self.close_connection = True
        self.server.receiver.answer(self)

    do_GET = do_POST  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Write no access log."""


@contextmanager
def receiving(answer: Answer | None = None, *, tls: bool = False) -> Iterator[Receiver]:
    """A receiver on a free loopback port; with TLS it is `hooks.test`."""
    server = Server(("127.0.0.1", 0), Handler)
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.receiver = Receiver(port=server.server_address[1], scheme="https" if tls else "http")
    if answer is not None:
        server.receiver.answer = answer
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server.receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

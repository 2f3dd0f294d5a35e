"""Time limits of an API's connections: of a request's head, a refused body, an unread answer."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from nightjar.pipeline.front.http_protocol import ApiProtocol
from tests.raw_http import RawAnswer, connect, exchange, raw_request, read_answers
from tests.services import free_port

HEAD_S, REST_S, READER_S = 1.2, 0.5, 1.0
LONG = 64 << 20
NO_BODY: list[RawAnswer] = []


class Hasty(ApiProtocol):
    head_s, rest_s, reader_s = HEAD_S, REST_S, READER_S


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a POST before its body; else send as many bytes as the query says."""
    size = int(scope["query_string"] or 2)
    status = 413 if scope["method"] == "POST" else 200
    headers = [(b"content-length", str(size).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    while size > 0:
        piece = min(size, 1 << 20)
        size -= piece
        await send({"type": "http.response.body", "body": bytes(piece), "more_body": size > 0})


@contextmanager
def serving(protocol: type[ApiProtocol]) -> Iterator[str]:
    port = free_port()
    config = uvicorn.Config(
        answer, port=port, http=protocol, lifespan="off", log_level="critical", access_log=False
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(Hasty) as url:
        yield url


def took(url: str, sent: bytes) -> tuple[float, list[RawAnswer]]:
    """How long the connection lived, and what was answered."""
    began = time.monotonic()
    answers = exchange(url, sent)
    return time.monotonic() - began, answers


def test_a_slow_head_is_refused(url: str) -> None:
    lived_s, answers = took(url, b"GET / HTTP/1.1\r\nHost: a\r\n")
    (only,) = answers
    assert (only.status, only.error()["code"]) == (408, "request_too_slow")
    assert HEAD_S - 0.1 < lived_s < HEAD_S + 5


def test_bytes_on_the_way_gain_no_time(url: str) -> None:
    began = time.monotonic()
    with connect(url) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        connection.settimeout(0.05)
        data = b""
        while not data and time.monotonic() - began < 10:
            try:
                data = connection.recv(100)
            except TimeoutError:
                connection.sendall(b"a")
    assert data.startswith(b"HTTP/1.1 408")
    assert time.monotonic() - began < HEAD_S + 5


def test_a_connection_without_a_byte_is_closed(url: str) -> None:
    lived_s, answers = took(url, b"")
    assert answers == NO_BODY
    assert HEAD_S - 0.1 < lived_s < HEAD_S + 5


def test_the_time_begins_anew_with_each_request(url: str) -> None:
    with connect(url) as connection:
        for _ in range(3):
            time.sleep(HEAD_S * 0.4)
            connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            data = b""
            while not data.endswith(b"\0\0"):  # the whole answer
                data += connection.recv(100)
            assert data.startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert [one.status for one in read_answers(connection)] == [200]


def test_the_rest_of_a_refused_body_is_not_read_for_ever(url: str) -> None:
    head = raw_request("/", length=LONG).replace(b"Connection: close\r\n", b"")
    with connect(url) as connection:
        connection.sendall(head)
        assert connection.recv(1_000).startswith(b"HTTP/1.1 413")
        began = time.monotonic()
        try:
            while time.monotonic() - began < 10:
                connection.sendall(b"a")
                time.sleep(0.02)
        except ConnectionError:
            pass
    assert REST_S - 0.2 < time.monotonic() - began < REST_S + 5


def test_a_refused_body_that_comes_soon_ends_well(url: str) -> None:
    with httpx.Client(base_url=url) as http:
        assert http.post("/", content=bytes(1 << 20)).status_code == 413
        assert http.get("/").status_code == 200


def test_an_answer_that_nobody_reads_is_given_up(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(raw_request(f"/?{LONG}", method="GET"))
        time.sleep(READER_S + 1.0)
        (cut,) = read_answers(connection)
    assert cut.status == 200
    assert len(cut.body) < LONG


def test_a_slow_reader_who_goes_on_gets_it_all(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(raw_request(f"/?{16 << 20}", method="GET"))
        read = 0
        while piece := connection.recv(1 << 20):
            read += len(piece)
            time.sleep(READER_S / 40)
    assert read > 16 << 20

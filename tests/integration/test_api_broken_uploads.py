"""Uploads that stall or break off on their way through both processes of `nightjar api`.

The second process runs the application alone: what it answers on its own socket is what one
process would answer.
"""

import http.client
import json
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import sqlalchemy as sa

from nightjar.jobs.api.places import UPLOADS_AT_ONCE
from nightjar.jobs.store import Store
from tests.api_process import Api, running_api, upload_sockets
from tests.databases import fresh_postgres_database
from tests.processes import wait_until
from tests.services import free_port

STALLED_AFTER_S = 3.0
JSONL = {"content-type": "application/jsonl"}
FIN, RESET = "closed", "reset"


@dataclass(frozen=True)
class Place:
    """An API, its database, and the port where it looks for a broker."""

    api: Api
    store: Store
    url: str
    broker_port: int

    def addresses(self) -> list[str]:
        """Where uploads may be sent: to both processes, and past the first to the second."""
        return [self.api.url, self.api.upload_process().cmdline()[-2]]

    def staged(self) -> int:
        """Staging tables that exist in PostgreSQL; SQLite's are their connection's own."""
        if self.url.startswith("sqlite"):
            return 0
        engine = sa.create_engine(self.url, poolclass=sa.NullPool)
        count = "SELECT count(*) FROM pg_class WHERE relname = 'nightjar_staged_row'"
        with engine.connect() as connection:
            return int(connection.scalar(sa.text(count)) or 0)

    def uploads_underway(self) -> int:
        """Connections to the second process."""
        return upload_sockets(self.api.upload_process()) - 1


@pytest.fixture(
    scope="module", params=[pytest.param("sqlite", marks=pytest.mark.slow), "postgresql"]
)
def place(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("api")
    port = free_port()
    named = {
        "NIGHTJAR_MODEL_NAME": "tiny",
        "NIGHTJAR_UPLOAD_STALLED_AFTER_S": str(STALLED_AFTER_S),
        "NIGHTJAR_BROKER_URL": f"redis://127.0.0.1:{port}/0",
    }
    with ExitStack() as stack:
        url = f"sqlite:///{folder / 'nightjar.db'}"
        if request.param == "postgresql":
            server = request.getfixturevalue("postgres_server")
            url = stack.enter_context(fresh_postgres_database(server))
        store = stack.enter_context(closing(Store(url)))
        store.migrate()
        api = stack.enter_context(running_api(url, tiny_model, folder, **named))
        yield Place(api, store, url, port)


def rows(count: int, prompt: str = "p") -> bytes:
    return b"".join(
        json.dumps(
            {
                "custom_id": f"row-{n}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": f"{n} {prompt}"},
            }
        ).encode()
        + b"\n"
        for n in range(count)
    )


def half_sent(address: str, body: bytes, sent: int, key: str | None = None) -> socket.socket:
    """A connection on which the first bytes of an upload have been sent."""
    if address.startswith("/"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
    else:
        parts = urlsplit(address)
        connection = socket.create_connection((parts.hostname, parts.port))
    connection.settimeout(30)
    head = ["POST /v1/jobs HTTP/1.1", "Host: here", "Content-Type: application/jsonl"]
    head.append(f"Content-Length: {len(body)}")
    if key is not None:
        head.append(f"Idempotency-Key: {key}")
    connection.sendall("\r\n".join([*head, "", ""]).encode() + body[:sent])
    return connection


def answer_on(connection: socket.socket) -> tuple[int, object]:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, json.loads(response.read())


def post(place: Place, body: bytes, key: str | None = None) -> httpx.Response:
    headers = JSONL if key is None else {**JSONL, "Idempotency-Key": key}
    return httpx.post(f"{place.api.url}/v1/jobs", headers=headers, content=body, timeout=60)


def job_ids(place: Place) -> set[str]:
    return {job.id for job in place.store.jobs.newest(100)}


@pytest.mark.slow
def test_a_stalled_upload_is_refused_in_time_as_by_one_process(place: Place) -> None:
    before = job_ids(place)
    body = rows(4_000)
    with ExitStack() as stack:
        stalled = [
            stack.enter_context(half_sent(address, body, len(body) // 2))
            for address in place.addresses()
        ]
        began = time.monotonic()
        answers = [answer_on(connection) for connection in stalled]
        took_s = time.monotonic() - began
    message = "the upload stalled; send it again"
    kind = "invalid_request_error"
    error = {"code": "upload_stalled", "message": message, "param": None, "type": kind}
    assert answers == [(408, {"error": error})] * 2
    assert STALLED_AFTER_S - 0.5 < took_s < STALLED_AFTER_S + 10
    wait_until("the staging to be cleaned", lambda: place.staged() == 0)
    assert job_ids(place) == before


def test_stalled_uploads_take_no_memory_and_keep_nobody_waiting(place: Place) -> None:
    """More of them than have a place: whoever comes next gets one when theirs is taken away."""
    body = rows(6_000, "x" * 4_000)  # far more than the buffers that every upload may have
    count = UPLOADS_AT_ONCE + 2
    processes = [psutil.Process(place.api.process.pid), place.api.upload_process()]
    with ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        # As many short ones first: buffers, threads, connections.
        short = list(pool.map(lambda _: post(place, body[: len(body) // 10]), range(count)))
        assert {answer.status_code for answer in short} == {201}
        before = peak_bytes(processes)
        stalled = [
            stack.enter_context(connection)
            for connection in pool.map(
                lambda _: half_sent(place.api.url, body, len(body) - 100), range(count)
            )
        ]
        began = time.monotonic()
        assert httpx.get(f"{place.api.url}/v1/jobs", timeout=60).status_code == 200
        polled_s = time.monotonic() - began
        assert post(place, rows(10)).json()["accepted"] == 10
        taken_s = time.monotonic() - began
        assert {answer_on(connection)[0] for connection in stalled} == {408}
    assert polled_s < STALLED_AFTER_S
    assert taken_s < 2 * STALLED_AFTER_S + 10  # the last two had to get a place themselves
    held = peak_bytes(processes) - before
    assert held < count * len(body) / 8, f"{held >> 20} MiB for {count * len(body) >> 20} MiB"


def test_senders_of_a_few_bytes_keep_nobody_waiting(place: Place) -> None:
    """They never stall, and there are more of them than places."""
    body = rows(4_000)
    stop = threading.Event()

    def trickle(connection: socket.socket) -> tuple[int, object]:
        for byte in body[:1_000]:
            if stop.is_set() or select.select([connection], [], [], 0.2)[0]:
                break
            connection.sendall(bytes([byte]))
        return answer_on(connection)

    with ExitStack() as stack, ThreadPoolExecutor(UPLOADS_AT_ONCE + 2) as pool:
        slow = [
            stack.enter_context(half_sent(place.api.url, body, 10))
            for _ in range(UPLOADS_AT_ONCE + 2)
        ]
        answers = [pool.submit(trickle, connection) for connection in slow]
        wait_until("them to arrive", lambda: place.uploads_underway() == len(slow))
        began = time.monotonic()
        assert post(place, rows(10)).json()["accepted"] == 10
        took_s = time.monotonic() - began
        refused = [answer.result(30) for answer in answers]
        stop.set()
    assert took_s < STALLED_AFTER_S
    assert {status for status, _ in refused} == {408}
    assert all("upload_too_slow" in str(answer) for _, answer in refused)


def peak_bytes(processes: list[psutil.Process]) -> int:
    """The most memory that they have held."""
    status = [Path(f"/proc/{process.pid}/status").read_text() for process in processes]
    lines = [line for text in status for line in text.splitlines() if line.startswith("VmHWM:")]
    assert len(lines) == len(processes)
    return sum(int(line.split()[1]) for line in lines) * 1024


@pytest.mark.parametrize("ending", [FIN, RESET])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
@pytest.mark.sampled
def test_an_upload_that_breaks_off_leaves_nothing_as_in_one_process(
    place: Place, ending: str, share: float
) -> None:
    before = job_ids(place)
    body = rows(4_000)
    for address in place.addresses():
        connection = half_sent(address, body, int(share * len(body)), key="broken")
        if share:
            wait_until("it to arrive", lambda: place.uploads_underway() > 0)
        if ending is RESET:
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()
    wait_until("their end", lambda: place.uploads_underway() == 0)
    wait_until("the staging to be cleaned", lambda: place.staged() == 0)
    assert job_ids(place) == before


def test_what_broke_off_is_in_no_later_job_and_holds_no_place(place: Place) -> None:
    """The connections to the database are used again: more uploads at once than have a place."""
    body = rows(4_000)
    for _ in range(2 * UPLOADS_AT_ONCE):
        half_sent(place.api.url, body, len(body) // 2, key="later").close()
    with ThreadPoolExecutor(2 * UPLOADS_AT_ONCE) as pool:
        sizes = range(1, 2 * UPLOADS_AT_ONCE + 1)
        taken = list(pool.map(lambda size: post(place, rows(size)).json(), sizes))
    assert [job["accepted"] for job in taken] == list(sizes)
    assert post(place, rows(3), key="later").json()["accepted"] == 3


def test_a_second_process_killed_in_mid_upload_lets_the_same_key_succeed_once(
    place: Place,
) -> None:
    before = job_ids(place)
    body = rows(4_000)
    killed = place.api.upload_process()
    with half_sent(place.api.url, body, len(body) // 2, key="mid") as connection:
        wait_until("it to arrive", lambda: place.uploads_underway() > 0)
        killed.send_signal(signal.SIGKILL)
        connection.sendall(body[len(body) // 2 :])
        status, refusal = answer_on(connection)
    assert status == 503
    assert refusal == {
        "error": {
            "code": "upload_lost",
            "message": "the process that takes uploads has ended; send it again, best with an "
            "Idempotency-Key",
            "param": None,
            "type": "server_error",
        }
    }
    assert job_ids(place) == before
    again = [post(place, body, key="mid") for _ in range(2)]
    assert [answer.status_code for answer in again] == [201, 200]
    assert {answer.json()["id"] for answer in again} == job_ids(place) - before
    assert again[0].json()["accepted"] == 4_000
    assert place.api.upload_process().pid != killed.pid


@pytest.mark.slow
def test_a_second_process_killed_after_landing_lets_the_same_key_find_the_job(
    place: Place,
) -> None:
    """It is killed while it tells the planner, by a broker that takes calls and says nothing."""
    before = job_ids(place)
    body = rows(100)
    with (
        socket.create_server(("127.0.0.1", place.broker_port)),
        half_sent(place.api.url, body, len(body), key="landed") as connection,
    ):
        wait_until("the job to land", lambda: job_ids(place) - before)
        place.api.upload_process().send_signal(signal.SIGKILL)
        status, refusal = answer_on(connection)
    assert (status, "upload_lost" in str(refusal)) == (503, True)
    again = post(place, body, key="landed")
    assert (again.status_code, {again.json()["id"]}) == (200, job_ids(place) - before)
    assert again.json()["counts"]["total"] == 100

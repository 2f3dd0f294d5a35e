"""Fault 23, strangers at the API: senders of a byte a second in all places, and foreign pages.

Meanwhile a real upload, which needs one of the places, and its job go through.
"""

import json
import select
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPResponse

import httpx
import pytest

from nightjar.jobs.api.places import PARSE_BYTES, UPLOADS_AT_ONCE
from tests.api_process import Api, upload_sockets
from tests.faults.api import API, answers_http, give_api
from tests.faults.conftest import Place
from tests.faults.load import let_pass
from tests.faults.rows import MOST_ROWS, batch_file
from tests.faults.system import HASTE, STEADY, System
from tests.services import free_port

pytestmark = pytest.mark.slow
STALLED_AFTER_S = 10.0
BYTE_EVERY_S = 1.0
JSONL = {"content-type": "application/jsonl"}
PAGES = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"referer": "https://evil.example/page"},
]


class SlowSenders:
    """Uploads that send some bytes at once, and from then on a byte a second.

    Args:
        port: Of the API.
        sent: How many bytes each of them sends at once.
    """

    def __init__(self, port: int, sent: list[int]) -> None:
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(len(sent))
        body = batch_file(MOST_ROWS)
        assert max(sent) < len(body) - 1_000
        self._answers = [self._pool.submit(self._send, port, body, first) for first in sent]

    def __enter__(self) -> "SlowSenders":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def refusals(self) -> list[str]:
        """What each of them was told, when all have been refused."""
        return [answer.result(3 * 60) for answer in self._answers]

    def _send(self, port: int, body: bytes, first: int) -> str:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            head = ["POST /v1/jobs HTTP/1.1", "Host: here", "Content-Type: application/jsonl"]
            head.append(f"Content-Length: {len(body)}")
            connection.sendall("\r\n".join([*head, "", ""]).encode() + body[:first])
            for byte in body[first:]:
                if self._stop.is_set() or select.select([connection], [], [], BYTE_EVERY_S)[0]:
                    break
                connection.sendall(bytes([byte]))
            connection.settimeout(30)
            answer = HTTPResponse(connection)
            answer.begin()
            return str(json.loads(answer.read())["error"]["code"])


class ForeignPages:
    """A browser whose pages submit, cancel and pause, and look under a name of their own."""

    def __init__(self, url: str, body: bytes) -> None:
        self._url = url
        self._body = body
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._rage)
        self.told: Counter[tuple[int, str]] = Counter()
        self.job_id = "no-such-job"  # what they would like to cancel

    @contextmanager
    def raging(self) -> Iterator[None]:
        """They call the API again and again while the block lasts."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def _rage(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._stop.wait(0.05):
                for page in PAGES:
                    headers = page | {"content-type": "text/plain"}
                    self._note(client.post("/v1/jobs", content=self._body, headers=headers))
                    for act in ("cancel", "pause"):
                        path = f"/v1/jobs/{self.job_id}/{act}"
                        self._note(client.post(path, headers=page))
                self._note(client.get("/v1/jobs", headers={"host": "evil.example"}))

    def _note(self, answer: httpx.Response) -> None:
        code = answer.json().get("error", {}).get("code", "no error")
        self.told[(answer.status_code, code)] += 1


def wait_for_senders(system: System, url: str, count: int) -> None:
    """Until all are connected with the process that takes uploads, and hold its places."""
    process = system.services[API].process
    assert process is not None
    uploads = Api(url, process).upload_process()
    system.wait_until("the slow senders", lambda: upload_sockets(uploads) > count)
    let_pass(system, 2.0)  # what they sent at once is read meanwhile


def test_slow_senders_and_foreign_pages_keep_no_upload_and_no_job(place: Place) -> None:
    port = free_port()
    url, body = f"http://127.0.0.1:{port}", batch_file(MOST_ROWS)
    # More than there are places have sent enough to get one; as many send slowly from the start.
    sent = [PARSE_BYTES + 1_000] * (UPLOADS_AT_ONCE + 2) + [10] * (UPLOADS_AT_ONCE + 2)
    given = {"NIGHTJAR_UPLOAD_STALLED_AFTER_S": str(STALLED_AFTER_S)}
    with (
        place.system(environment=HASTE | STEADY | given, prepare=partial(give_api, port)) as system,
        ExitStack() as stack,
    ):
        system.wait_until("the API", lambda: answers_http(url))
        senders = stack.enter_context(SlowSenders(port, sent))
        wait_for_senders(system, url, len(sent))
        pages = ForeignPages(url, batch_file(1))
        stack.enter_context(pages.raging())
        uploads = [
            stack.enter_context(ThreadPoolExecutor(1)).submit(
                httpx.post, f"{url}/v1/jobs", headers=JSONL, content=content, timeout=120
            )
            for content in (batch_file(40), body)
        ]
        taken_s = [system.wait_until("an upload", upload.done) for upload in uploads]
        taken = [upload.result() for upload in uploads]
        assert [answer.status_code for answer in taken] == [201, 201], taken
        system.jobs += [answer.json()["id"] for answer in taken]
        pages.job_id = system.jobs[-1]
        system.wait_done()
        refused = Counter(senders.refusals())
        stack.pop_all().close()
        calls = pages.told.total()
        verdict = place.judge(
            system,
            23,
            f"{len(sent)} senders of a byte a second, foreign pages and hosts at the API",
            len(sent) + calls,
            recovery_s=sum(taken_s),
            note=f"until an upload of {len(body) >> 10} KiB had a place and was taken, a small one "
            f"after {taken_s[0]:.1f} s; all {len(sent)} slow ones "
            f"and {calls} foreign calls were refused",
        )
        verdict.check(0)
        assert sum(taken_s) > STALLED_AFTER_S / 2  # else they held no place
        assert set(refused) == {"upload_too_slow"}, refused
        assert set(pages.told) == {(403, "foreign_origin"), (421, "untrusted_host")}, pages.told
        assert {job.id for job in system.store.jobs.newest(10)} == set(system.jobs)
        assert not system.restarted
        assert "Traceback" not in system.log(API)

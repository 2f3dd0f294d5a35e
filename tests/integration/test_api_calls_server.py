"""Single calls against a real API process: clients that go away, and clients that dawdle."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from nightjar.jobs.states import JobState
from nightjar.jobs.store import Store
from nightjar.jobs.store.tables import job
from tests.api_process import Api, running_api
from tests.processes import wait_until

ASKED = {"prompt": "hello", "max_tokens": 4}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path_factory.mktemp('calls') / 'nightjar.db'}")
    store.migrate()
    yield store
    store.close()


@pytest.fixture(scope="module")
def api(
    database: Store, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Api]:
    """No broker and no worker: calls wait."""
    folder = tmp_path_factory.mktemp("api")
    settings = {"NIGHTJAR_UPLOAD_STALLED_AFTER_S": "1"}
    url = database.database.url.render_as_string()
    with running_api(url, tiny_model, folder, **settings) as running:
        running.upload_process()
        yield running


def calls(store: Store) -> dict[str, JobState]:
    """The state of each call."""
    with store.database.reading() as connection:
        rows = connection.execute(sa.select(job.c.id, job.c.state).where(job.c.live))
        return dict(rows.all())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_row(api: Api, database: Store, stream: bool) -> None:
    before = calls(database)
    with (
        httpx.Client(base_url=api.url, timeout=httpx.Timeout(30, read=1.5)) as client,
        pytest.raises(httpx.ReadTimeout),
    ):
        client.post("/v1/completions", json={**ASKED, "stream": stream})

    def mine() -> list[JobState]:
        return [state for id_, state in calls(database).items() if id_ not in before]

    wait_until("the end of the row", lambda: mine() == [JobState.CANCELLED], 20)


def test_the_model_of_this_api_is_checked_at_once(api: Api) -> None:
    def refused() -> bool:
        with httpx.Client(base_url=api.url, timeout=httpx.Timeout(30, read=3)) as client:
            try:
                answer = client.post("/v1/completions", json={**ASKED, "model": "gpt-9"})
            except httpx.ReadTimeout:  # the model's files are not read yet
                return False
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        return True

    wait_until("the refusal", refused, 30)


def test_a_body_that_stalls_is_refused(api: Api) -> None:
    raw = json.dumps(ASKED).encode()
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(raw)}\r\n\r\n"
        )
        connection.sendall(head.encode() + raw[:5])
        began = time.monotonic()
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408")
        assert time.monotonic() - began < 20


@pytest.mark.slow
def test_an_api_that_ends_gives_up_calls_that_wait(
    database: Store, tiny_model: Path, tmp_path: Path
) -> None:
    url = database.database.url.render_as_string()
    with running_api(url, tiny_model, tmp_path) as ending, ThreadPoolExecutor(1) as threads:
        ending.upload_process()
        before = calls(database)
        path = f"{ending.url}/v1/completions"
        answer = threads.submit(httpx.post, path, json=ASKED, timeout=60)
        wait_until("the call", lambda: len(calls(database)) > len(before))
        ending.process.terminate()
        assert answer.result().status_code == 503
        assert answer.result().json()["error"]["code"] == "api_ends"
        assert answer.result().headers["Retry-After"] == "1"
        assert ending.process.wait(30) == 0

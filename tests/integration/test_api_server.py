"""`nightjar api`: uploads are taken by a second process, and nobody but the polls can tell."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from fastapi.testclient import TestClient

from nightjar.jobs.api import create_app
from nightjar.jobs.api.body import UploadLimits
from nightjar.jobs.store import Store
from nightjar.pipeline.client.blocking import Client
from nightjar.pipeline.settings import Settings
from tests.api_process import Api, running_api, starting_api, upload_sockets
from tests.jobs import planned
from tests.outcomes import compute
from tests.processes import all_ended, find_children, nightjar, wait_until

MAX_BYTES = 2_000_000
JSONL = {"content-type": "application/jsonl"}

between_processes = pytest.mark.parametrize(
    "database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)
"""What is tested does not depend on the database: `make test` takes SQLite alone.

Uploads that break off are tested on both (test_api_broken_uploads.py).
"""


def row(custom_id: str) -> bytes:
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions"}
    return json.dumps({**line, "body": {"prompt": "p"}}).encode() + b"\n"


@pytest.fixture
def api(store: Store, database_url: str, tiny_model: Path, tmp_path: Path) -> Iterator[Api]:
    named = {"NIGHTJAR_MODEL_NAME": "tiny", "NIGHTJAR_MAX_UPLOAD_BYTES": str(MAX_BYTES)}
    with running_api(database_url, tiny_model, tmp_path, **named) as running:
        yield running


@pytest.mark.slow
@between_processes
def test_an_upload_is_answered_as_if_there_was_one_process(
    api: Api, store: Store, tmp_path: Path
) -> None:
    many = b"".join(row(f"row-{n}") for n in range(5_000))
    keyed = {**JSONL, "Idempotency-Key": "night"}
    asked: list[tuple[str, dict[str, str], bytes]] = [
        ("", JSONL, row("a") + b"{broken\n" + row("a")),
        ("?model=tiny&metadata=%7B%22a%22%3A%22%EA%B0%80%22%7D&priority=3", JSONL, many),
        ("", keyed, row("a")),
        ("", keyed, row("a")),
        ("?model=other", JSONL, row("a")),
        ("", {"content-type": "image/png"}, row("a")),
        ("?completion_window=soon", JSONL, row("a")),
        ("", JSONL, b"\n"),
        ("", JSONL, b"x" * (MAX_BYTES + 1)),
    ]
    with (
        TestClient(
            create_app(store, no_broker, served_model="tiny", limits=UploadLimits(MAX_BYTES))
        ) as here,
        httpx.Client(base_url=api.url, timeout=60) as there,
    ):
        for turn in (0, 1):  # a known length, and in chunks
            for query, headers, body in asked:
                if "Idempotency-Key" in headers:
                    headers = {**headers, "Idempotency-Key": f"night-{turn}"}  # noqa: PLW2901
                alone = here.post(f"/v1/jobs{query}", headers=headers, content=sent(body, turn))
                if "Idempotency-Key" in headers:
                    headers["Idempotency-Key"] += "-two"
                two = there.post(f"/v1/jobs{query}", headers=headers, content=sent(body, turn))
                assert (two.status_code, plain(two)) == (alone.status_code, plain(alone)), query
    assert "metadata=" not in (tmp_path / "api.log").read_text(encoding="utf-8")


@pytest.mark.slow
@between_processes
def test_a_sender_is_told_of_rejected_rows_and_fails_with_all_of_them(
    api: Api, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(row("a") + b"{broken\n")
    some = nightjar("submit", source, "--api", api.url)
    assert (some.returncode, json.loads(some.stdout)["accepted"]) == (0, 1)
    status = nightjar("status", json.loads(some.stdout)["id"], "--api", api.url)
    assert json.loads(status.stdout)["waits_for"] == ["gpu_worker", "planner"]
    assert "it waits: no GPU worker has given a sign of life yet" in status.stderr
    assert "1 of 2 rows were rejected; the first: line 2: is broken JSON" in some.stderr
    source.write_bytes(b'{"prompt": "no batch line"}\n' * 3)
    none = nightjar("submit", source, "--api", api.url)
    assert none.returncode == 4, none.stderr
    assert json.loads(none.stdout)["state"] == "failed"
    assert "3 of 3 rows were rejected; the first: line 1, custom_id: is missing" in none.stderr


def no_broker(_: str) -> None:
    raise ConnectionError


def sent(body: bytes, turn: int) -> bytes | Iterator[bytes]:
    return iter([body[:7], body[7:]]) if turn else body


def plain(answer: httpx.Response) -> object:
    """What two jobs of one content have in common."""
    told = answer.json()
    return {k: v for k, v in told.items() if k not in {"id", "created_at", "idempotency_key"}}


@pytest.mark.slow  # test_api_broken_uploads.py has it with a key
@between_processes
def test_an_upload_whose_process_is_killed_is_refused_and_the_next_one_taken(
    api: Api, store: Store
) -> None:
    killed = api.upload_process()

    def broken_off() -> Iterator[bytes]:
        for n in range(1_000):
            yield row(f"row-{n}")
        killed.send_signal(signal.SIGKILL)
        time.sleep(0.2)
        for n in range(1_000, 10_000):
            yield row(f"row-{n}")

    with httpx.Client(base_url=api.url, timeout=60) as client:
        assert client.post("/v1/jobs", headers=JSONL, content=row("first")).status_code == 201
        refused = client.post("/v1/jobs", headers=JSONL, content=broken_off())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "upload_lost")
        answer = client.post("/v1/jobs", headers=JSONL, content=row("next"))
        assert (answer.status_code, answer.json()["accepted"]) == (201, 1)
    assert [job.total for job in store.jobs.newest(9)] == [1, 1]
    assert api.upload_process().pid != killed.pid


@pytest.mark.slow
@between_processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_second_process_yields_to_the_first_and_ends_with_it(
    api: Api, number: signal.Signals
) -> None:
    child = api.upload_process()
    assert child.nice() == max(os.nice(0), Settings().worker_niceness)  # polls go first
    api.process.send_signal(number)
    api.process.wait(30)
    wait_until("its end", lambda: all_ended([child]))


@between_processes
def test_an_api_told_to_end_in_mid_upload_takes_it_first(api: Api, store: Store) -> None:
    child = api.upload_process()
    socket = child.cmdline()[-2]

    def told_to_end() -> Iterator[bytes]:
        for n in range(2_000):
            yield row(f"row-{n}")
            if n == 1_000:
                api.process.send_signal(signal.SIGTERM)
                time.sleep(0.5)

    answer = httpx.post(f"{api.url}/v1/jobs", headers=JSONL, content=told_to_end(), timeout=60)
    assert (answer.status_code, answer.json()["accepted"]) == (201, 2_000)
    assert api.process.wait(30) == 0
    assert all_ended([child])
    assert not Path(socket).parent.exists()
    assert [job.total for job in store.jobs.newest(9)] == [2_000]


def test_an_api_killed_in_mid_upload_leaves_neither_process_nor_job(api: Api, store: Store) -> None:
    child = api.upload_process()

    def broken_off() -> Iterator[bytes]:
        for n in range(2_000):
            yield row(f"row-{n}")
            if n == 1_000:
                wait_until("it to arrive", lambda: upload_sockets(child) > 1)
                api.process.kill()
                api.process.wait(30)

    with pytest.raises(httpx.TransportError):
        httpx.post(f"{api.url}/v1/jobs", headers=JSONL, content=broken_off(), timeout=60)
    wait_until("the second process's end", lambda: all_ended([child]))
    assert store.jobs.newest(9) == []


def test_an_api_killed_while_its_second_process_starts_leaves_none(
    sqlite_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    with starting_api(sqlite_url, tiny_model, tmp_path) as api:
        children: list[psutil.Process] = []

        def has_child() -> bool:
            children[:] = find_children(api.process.pid, "nightjar.pipeline.front.api_server")
            return bool(children)

        wait_until("the second process", has_child)
        api.process.kill()
        api.process.wait(30)
        assert not upload_sockets(children[0])
        wait_until("its end", lambda: all_ended(children))


@pytest.mark.slow
def test_an_api_told_to_end_leaves_no_log_of_sqlite_behind(
    sqlite_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    made = Store(sqlite_url)
    made.migrate()
    made.close()
    file = Path(sqlite_url.removeprefix("sqlite:///"))
    many = b"".join(row(f"row-{n}") for n in range(5_000))
    with running_api(sqlite_url, tiny_model, tmp_path) as api:
        job = httpx.post(f"{api.url}/v1/jobs", headers=JSONL, content=many, timeout=60).json()
        log = file.with_name(file.name + "-wal")
        assert log.stat().st_size > 100_000
        api.process.send_signal(signal.SIGTERM)
        assert api.process.wait(30) == 0
    assert not log.exists()
    found = Store(sqlite_url)
    assert found.jobs.get(job["id"]).total == 5_000
    found.close()


@between_processes
def test_a_client_follows_a_job_while_it_runs(api: Api, store: Store) -> None:
    """Rows land from the last to the first; the client never looks back."""
    job_id, refs = planned(store, 40, each=2)

    def work() -> None:
        for ref in reversed(refs):
            compute(store, ref)

    with Client(api.url) as client, ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        seen = [one.custom_id for one in client.job(job_id).follow(every_s=0.05)]
        working.result()
        assert sorted(seen) == sorted(f"row-{n}" for n in range(40))
        in_order = [one.custom_id for one in client.job(job_id).results()]
        assert in_order == [f"row-{n}" for n in range(40)]
        waiting, some = planned(store, 4)
        compute(store, some[2])
        assert [one.custom_id for one in client.job(waiting).results()] == ["row-2"]

"""The process that takes uploads when it does not start: /health says so, polls go on."""

import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import nightjar
from nightjar.jobs.api import create_app
from nightjar.jobs.store import Store
from nightjar.pipeline.front.upload_process import UploadProcess
from tests.processes import wait_until

OK = {"status": "ok", "version": nightjar.__version__, "models": {}}


@pytest.fixture
def sqlite_store(sqlite_url: str) -> Iterator[Store]:
    opened = Store(sqlite_url)
    opened.migrate()
    yield opened
    opened.close()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, sqlite_url: str, tiny_model: Path) -> None:
    monkeypatch.setenv("NIGHTJAR_DATABASE_URL", sqlite_url)
    monkeypatch.setenv("NIGHTJAR_BROKER_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("NIGHTJAR_MODEL", str(tiny_model))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def no_broker(_: str) -> None:
    raise ConnectionError


def health(client: TestClient) -> tuple[int, str]:
    answer = client.get("/health")
    body = answer.json()
    message = body.pop("message", "")
    parts = body.pop("parts")
    assert all(part == "ok" or part in message for part in parts.values())
    assert body == OK | {"status": "ok" if answer.status_code == 200 else "unavailable"}
    return answer.status_code, message


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_a_socket_that_cannot_be_bound_is_said_until_it_can(sqlite_store: Store) -> None:
    uploads = UploadProcess()
    uploads.socket.mkdir()
    with uploads, TestClient(create_app(sqlite_store, no_broker, taker=uploads)) as client:
        assert health(client) == (200, "")  # a start takes its time
        wait_until("the fault to be said", lambda: health(client)[0] == 503)
        assert health(client)[1].startswith("uploads are not taken: their process ended ")
        assert "times in a row" in health(client)[1]
        assert "with status 1" in health(client)[1]
        assert client.get("/v1/jobs").status_code == 200
        uploads.socket.rmdir()
        wait_until("the next start", lambda: health(client) == (200, ""))
        line = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"p"}}'
        assert client.post("/v1/jobs?model=tiny", content=line).json()["accepted"] == 1


def test_a_process_that_cannot_be_made_is_tried_again_and_said(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with (
        UploadProcess() as uploads,
        TestClient(create_app(sqlite_store, no_broker, taker=uploads)) as client,
    ):
        wait_until("the fault to be said", lambda: health(client)[0] == 503)
        assert "2 times in a row" in health(client)[1]
        assert "No such file or directory" in health(client)[1]


def test_a_process_that_never_listens_is_said(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightjar.pipeline.front.upload_process.START_S", 0.1)
    uploads = UploadProcess()  # and nobody starts it
    with TestClient(create_app(sqlite_store, no_broker, taker=uploads)) as client:
        wait_until("the fault to be said", lambda: health(client)[0] == 503)
        assert "does not listen" in health(client)[1]


def test_a_database_that_is_away_as_well_is_said_too(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightjar.pipeline.front.upload_process.START_S", 0.0)
    without_tables = Store(sqlite_url)
    with TestClient(create_app(without_tables, no_broker, taker=UploadProcess())) as client:
        status, message = health(client)
    assert status == 503
    assert "database" in message.split("; uploads are not taken")[0]


def test_an_upload_that_finds_no_process_is_told(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightjar.jobs.api.forwarding.START_S", 0.3)
    uploads = UploadProcess()  # and nobody starts it
    with TestClient(create_app(sqlite_store, no_broker, taker=uploads)) as client:
        answer = client.post("/v1/jobs?model=tiny", content=b"{}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "uploads_unavailable")
    assert "GET /health" in error["message"]


def test_a_lost_upload_is_answered_when_its_process_is_gone(sqlite_store: Store) -> None:
    """This test is the process: it ends like one that is killed, its connections first."""
    uploads = UploadProcess()
    lost, gone = threading.Event(), threading.Event()

    def end_slowly(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            connection.recv(1)
        lost.set()
        time.sleep(0.5)
        listener.close()
        gone.set()
        uploads.ends += 1

    with (
        socket.socket(socket.AF_UNIX) as listener,
        TestClient(create_app(sqlite_store, no_broker, taker=uploads)) as client,
    ):
        listener.bind(str(uploads.socket))
        listener.listen()
        thread = threading.Thread(target=end_slowly, args=(listener,))
        thread.start()
        answer = client.post("/v1/jobs?model=tiny", content=b"{}")
        assert lost.is_set()
        assert gone.is_set()
        thread.join()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upload_lost")


# SIGTERM comes during the garbage collection at the end of the start, which drops exceptions.
TOLD_WHILE_IT_STARTS = """
import gc, os, signal, sys
from pathlib import Path
from nightjar.pipeline.front import api_server
from nightjar.pipeline.settings import Settings

def tell(*_):
    gc.callbacks.clear()
    os.kill(os.getpid(), signal.SIGTERM)

start = api_server.application
def started(*arguments, **options):
    made = start(*arguments, **options)
    gc.disable()
    gc.callbacks.append(tell)
    return made

api_server.application = started
{start}
"""


@pytest.mark.usefixtures("environment", "sqlite_store")
@pytest.mark.parametrize(
    "start",
    [
        "api_server.serve_uploads(Settings.read(), Path(sys.argv[1]))",
        pytest.param("api_server.serve(Settings.read(), '127.0.0.1', 0)", marks=pytest.mark.slow),
    ],
    ids=["uploads", "api"],
)
def test_a_process_told_to_end_while_it_starts_ends(start: str, tmp_path: Path) -> None:
    code = TOLD_WHILE_IT_STARTS.format(start=start)
    command = [sys.executable, "-c", code, str(tmp_path / "socket")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_deaf_to_the_signal_is_killed_when_the_api_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deaf, told = tmp_path / "deaf", tmp_path / "told"
    deaf.write_text(
        f"#!/bin/sh\ntrap '' TERM\necho $$ > {told}.new\nmv {told}.new {told}\n"
        "while :; do sleep 0.05; done\n"
    )
    deaf.chmod(deaf.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(deaf))
    monkeypatch.setattr("nightjar.pipeline.front.upload_process._GRACE_S", 0.2)
    with UploadProcess():
        wait_until("the process", told.exists)
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)

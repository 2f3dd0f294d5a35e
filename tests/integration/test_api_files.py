"""Files over HTTP: what is taken, what is refused, and what remains of it."""

import asyncio
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from nightjar.jobs.api import create_app
from nightjar.jobs.api import files as routes
from nightjar.jobs.api.body import UploadLimits, may_store_any
from nightjar.jobs.api.places import PARSE_BYTES, UPLOADS_AT_ONCE
from nightjar.jobs.errors import UnknownFileError
from nightjar.jobs.file_records import PART_BYTES, NewFile
from nightjar.jobs.records import DEFAULT_TENANT
from nightjar.jobs.store import Store
from tests.jobs import planned
from tests.outcomes import compute

MAX_BYTES = 4 * PART_BYTES
LINE = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"p"}}\n'
BATCH = {"purpose": "batch"}


@pytest.fixture
def store(sqlite_url: str, migrated_sqlite_file: Path) -> Iterator[Store]:
    shutil.copy(migrated_sqlite_file, sqlite_url.removeprefix("sqlite:///"))
    opened = Store(sqlite_url)
    yield opened
    opened.close()


def client_of(store: Store, **limits: Any) -> TestClient:
    limits = {"max_bytes": MAX_BYTES, **limits}
    return TestClient(create_app(store, lambda _: None, limits=UploadLimits(**limits)))


@pytest.fixture
def client(store: Store) -> TestClient:
    return client_of(store)


def upload(client: TestClient, content: bytes = LINE, **fields: str) -> dict[str, Any]:
    sent = {"file": ("in.jsonl", content)}
    response = client.post("/v1/files", files=sent, data=BATCH | fields)
    assert response.status_code == 200, response.text
    payload: dict[str, Any] = response.json()
    return payload


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"], error["param"]


def is_empty(store: Store) -> bool:
    """Whether no file is left, nor anything that could become one."""
    store.file_sweeping.sweep_files()
    listed = store.files.newest(10, DEFAULT_TENANT)
    return listed == [] and store.file_sweeping.uploading() == []


def test_a_file_in_openai_s_shape(client: TestClient) -> None:
    made = upload(client)
    assert made == {
        "id": made["id"],
        "object": "file",
        "bytes": len(LINE),
        "created_at": made["created_at"],
        "expires_at": made["created_at"] + 30 * 86_400,
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "processed",
    }
    assert made["id"].startswith("file-")
    assert client.get(f"/v1/files/{made['id']}").json() == made
    content = client.get(f"/v1/files/{made['id']}/content")
    assert content.content == LINE
    assert content.headers["content-length"] == str(len(LINE))
    assert content.headers["etag"] == f'"{hashlib.sha256(LINE).hexdigest()}"'
    assert content.headers["content-disposition"] == "attachment; filename*=UTF-8''in.jsonl"
    gone = client.delete(f"/v1/files/{made['id']}")
    assert gone.json() == {"id": made["id"], "object": "file", "deleted": True}
    for answer in (
        client.get(f"/v1/files/{made['id']}"),
        client.get(f"/v1/files/{made['id']}/content"),
        client.delete(f"/v1/files/{made['id']}"),
    ):
        assert error_of(answer) == (404, "unknown_file", None)


@pytest.mark.parametrize("size", [PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 5])
def test_a_file_of_several_parts(client: TestClient, store: Store, size: int) -> None:
    content = (LINE * (size // len(LINE) + 1))[:size]
    made = upload(client, content)
    assert made["bytes"] == size
    assert client.get(f"/v1/files/{made['id']}/content").content == content
    parts = [len(part) for part in store.files.parts(made["id"])]
    assert max(parts) <= PART_BYTES
    assert len(parts) == -(-size // PART_BYTES)


def test_the_purpose_may_come_behind_the_file(client: TestClient) -> None:
    """And may be wrong there: parts of the file are stored by then."""
    files = [("file", ("in.jsonl", LINE * 20_000)), ("purpose", (None, "batch"))]
    assert client.post("/v1/files", files=files).status_code == 200
    files[1] = ("purpose", (None, "vision"))
    assert error_of(client.post("/v1/files", files=files)) == (400, "invalid_purpose", "purpose")
    assert len(client.get("/v1/files").json()["data"]) == 1


def test_a_file_that_expires(client: TestClient) -> None:
    made = upload(
        client, **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    )
    assert made["expires_at"] == made["created_at"] + 3_600
    assert client.get(f"/v1/files/{made['id']}").json() == made


def test_a_name_with_a_path_and_control_characters(client: TestClient) -> None:
    raw = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="/a/\x1b[2Jb\t\xeb\xb0\xa4"'
    )
    body = raw + b"\r\n\r\n" + LINE + b"\r\n" + PURPOSE
    made = client.post("/v1/files", content=body, headers=FORM).json()
    assert made["filename"] == "[2Jb밤"
    disposition = client.get(f"/v1/files/{made['id']}/content").headers["content-disposition"]
    assert disposition == "attachment; filename*=UTF-8''%5B2Jb%EB%B0%A4"


FORM = {"content-type": "multipart/form-data; boundary=b"}
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'


def sent(**options: Any) -> Callable[[TestClient], httpx.Response]:
    return lambda client: client.post("/v1/files", **options)


FILE = {"file": ("in.jsonl", LINE)}
BAD_UPLOADS = {
    "no purpose": (sent(files=FILE), 400, "missing_field", "purpose"),
    "no file": (
        sent(content=PURPOSE, headers=FORM),
        400,
        "missing_field",
        "file",
    ),
    "an output's purpose": (
        sent(files=FILE, data={"purpose": "batch_output"}),
        400,
        "invalid_purpose",
        "purpose",
    ),
    "another purpose": (
        sent(files=FILE, data={"purpose": "fine-tune"}),
        400,
        "invalid_purpose",
        "purpose",
    ),
    "two files": (
        sent(files=[("file", ("a", LINE)), ("file", ("b", LINE))], data=BATCH),
        400,
        "repeated_field",
        "file",
    ),
    "another boundary": (
        sent(content=PURPOSE, headers={"content-type": "multipart/form-data; boundary=c"}),
        400,
        "invalid_form",
        None,
    ),
    "no multipart": (sent(content=LINE, headers=FORM), 400, "invalid_form", None),
    "JSON": (sent(json=BATCH), 415, "unsupported_content_type", "Content-Type"),
    "half a form": (sent(content=PURPOSE[:-8], headers=FORM), 400, "invalid_form", None),
    "nothing": (sent(content=b"", headers=FORM), 400, "invalid_form", None),
    "an empty file": (
        sent(files={"file": ("in.jsonl", b"")}, data=BATCH),
        400,
        "empty_file",
        "file",
    ),
    "a Parquet file": (
        sent(files={"file": ("in.parquet", b"PAR1" + bytes(99))}, data=BATCH),
        400,
        "not_batch_lines",
        "file",
    ),
    "too large, as announced": (
        sent(files={"file": ("in.jsonl", LINE * (MAX_BYTES // len(LINE) + 1))}, data=BATCH),
        413,
        "upload_too_large",
        None,
    ),
    "too large, unannounced": (
        lambda client: client.post(
            "/v1/files",
            content=iter([FILE_HEAD, *[LINE * 1_000] * (MAX_BYTES // len(LINE) // 1_000 + 1)]),
            headers=FORM,
        ),
        413,
        "upload_too_large",
        None,
    ),
    "compressed": (
        sent(files=FILE, data=BATCH, headers={"content-encoding": "gzip"}),
        415,
        "unsupported_encoding",
        "Content-Encoding",
    ),
    "a long field": (
        sent(files=FILE, data={"purpose": "b" * 2_000}),
        400,
        "field_too_long",
        "purpose",
    ),
    "many fields": (
        sent(files=FILE, data=BATCH | {f"n{number}": "1" for number in range(9)}),
        400,
        "unknown_field",
        "n0",
    ),
    "a bad life": (
        sent(files=FILE, data=BATCH | {"expires_after[seconds]": "3600"}),
        400,
        "invalid_expires_after",
        "expires_after[anchor]",
    ),
}
FILE_HEAD = b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'


@pytest.mark.parametrize("how", BAD_UPLOADS)
def test_a_bad_upload_is_refused_and_leaves_nothing(
    client: TestClient, store: Store, how: str
) -> None:
    send, *refusal = BAD_UPLOADS[how]
    assert error_of(send(client)) == tuple(refusal)
    assert is_empty(store)


def test_a_quota_is_asked_before_each_part(store: Store) -> None:
    asked: list[tuple[str, int]] = []

    def may_store(tenant: str, size: int) -> bool:
        asked.append((tenant, size))
        return store.files.stored_bytes(tenant) + size <= 2 * PART_BYTES

    client = client_of(store, may_store=may_store)
    pieces = iter([FILE_HEAD, LINE * (3 * PART_BYTES // len(LINE) + 1), b"\r\n" + PURPOSE])
    answer = client.post("/v1/files", content=pieces, headers=FORM)
    assert error_of(answer) == (403, "storage_quota_exceeded", None)
    assert asked == [(DEFAULT_TENANT, PART_BYTES)] * 3
    assert is_empty(store)
    assert store.files.stored_bytes(DEFAULT_TENANT) == 0
    asked.clear()
    upload(client, LINE)
    assert asked == [(DEFAULT_TENANT, len(LINE))]


def test_a_quota_refuses_an_announced_length_before_it_comes(store: Store) -> None:
    client = client_of(store, may_store=lambda _, size: size < PART_BYTES)
    big = {"file": ("in.jsonl", LINE * (2 * PART_BYTES // len(LINE)))}
    answer = client.post("/v1/files", files=big, data=BATCH)
    assert error_of(answer) == (403, "storage_quota_exceeded", None)
    assert may_store_any(DEFAULT_TENANT, 1 << 60)


def test_a_listing_in_pages(client: TestClient, store: Store) -> None:
    made = [upload(client)["id"] for _ in range(3)]
    first = client.get("/v1/files", params={"limit": 2}).json()
    ids = [one["id"] for one in first["data"]]
    assert (first["object"], first["has_more"]) == ("list", True)
    assert (first["first_id"], first["last_id"]) == (ids[0], ids[1])
    second = client.get("/v1/files", params={"limit": 2, "after": ids[1]}).json()
    assert second["has_more"] is False
    assert {*ids, *(one["id"] for one in second["data"])} == set(made)
    upwards = client.get("/v1/files", params={"order": "asc"}).json()["data"]
    assert [one["id"] for one in upwards] == [*ids, second["data"][0]["id"]][::-1]
    for purpose, count in (("batch", 3), ("batch_output", 0), ("vision", 0), ("\x00", 0)):
        page = client.get("/v1/files", params={"purpose": purpose}).json()
        assert len(page["data"]) == count
    empty = client.get("/v1/files", params={"after": made[0], "order": "asc", "limit": 1}).json()
    assert empty["data"] != []
    last = client.get("/v1/files", params={"after": upwards[-1]["id"], "order": "asc"}).json()
    assert (last["data"], last["first_id"], last["has_more"]) == ([], None, False)


def test_a_foreign_after(client: TestClient, store: Store) -> None:
    file_id = store.files.begin(NewFile("them", "in.jsonl"))
    store.files.append(file_id, 0, LINE)
    store.files.end(file_id, len(LINE), "0" * 64)
    ours = upload(client)["id"]
    for after in (file_id, "file-unknown", "job_1", "batch_1", "", "\x00", "x" * 99, "밤"):
        answer = client.get("/v1/files", params={"after": after})
        assert error_of(answer) == (400, "invalid_after", "after"), after
    other_list = {"after": ours, "purpose": "batch_output"}
    assert error_of(client.get("/v1/files", params=other_list)) == (400, "invalid_after", "after")
    for call in (client.get, client.delete):
        assert error_of(call(f"/v1/files/{file_id}")) == (404, "unknown_file", None)
    assert error_of(client.get(f"/v1/files/{file_id}/content")) == (404, "unknown_file", None)
    assert [one["id"] for one in client.get("/v1/files").json()["data"]] == [ours]


@pytest.mark.parametrize(
    ("name", "value"),
    [("limit", "-1"), ("limit", "0"), ("limit", "10001"), ("limit", "x"), ("order", "up")],
)
def test_a_bad_parameter_of_a_listing(client: TestClient, name: str, value: str) -> None:
    answer = client.get("/v1/files", params={name: value})
    assert error_of(answer) == (400, "invalid_parameter", name)


@pytest.mark.parametrize("file_id", ["%00", "%EB%B0%A4", "x" * 99, "file-1"])
def test_an_id_that_no_file_has(client: TestClient, file_id: str) -> None:
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        assert error_of(client.get(path)) == (404, "unknown_file", None)
    assert error_of(client.delete(f"/v1/files/{file_id}")) == (404, "unknown_file", None)


def test_a_file_that_a_batch_reads_is_not_deleted(
    client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = upload(client)["id"]
    monkeypatch.setattr(store.files, "is_in_use", lambda _, file_id: file_id == made)
    assert error_of(client.delete(f"/v1/files/{made}")) == (409, "file_in_use", None)
    assert client.get(f"/v1/files/{made}/content").content == LINE


def test_a_result_file_shows_the_results_of_its_job(client: TestClient, store: Store) -> None:
    job_id, refs = planned(store, 3)
    for ref in refs:
        compute(store, ref)
    file_id = store.database.write(
        lambda connection: store.files.add_result_file(
            connection, DEFAULT_TENANT, job_id, "succeeded", 1, "out.jsonl", None
        )
    )
    shown = client.get(f"/v1/files/{file_id}").json()
    assert (shown["purpose"], shown["expires_at"]) == ("batch_output", None)
    content = client.get(f"/v1/files/{file_id}/content")
    assert "content-length" not in content.headers
    assert content.content == client.get(f"/v1/jobs/{job_id}/output").content
    assert len(content.content.splitlines()) == 3
    assert client.delete(f"/v1/files/{file_id}").status_code == 200
    assert len(store.results.read(job_id)) == 3


def test_a_file_that_is_deleted_while_it_is_read_does_not_seem_whole(
    client: TestClient, store: Store
) -> None:
    made = store.files.get(upload(client, LINE * 30_000)["id"], DEFAULT_TENANT)
    reading = routes.content_of(store, made)
    next(reading)
    client.delete(f"/v1/files/{made.id}")
    store.file_sweeping.sweep_files()
    with pytest.raises(UnknownFileError):
        list(reading)


def received(store: Store, *messages: dict[str, Any], **limits: Any) -> tuple[int, str]:
    """The answer to a sender of these messages, from whom nothing more comes."""
    app = create_app(store, lambda _: None, limits=UploadLimits(**limits))
    waiting, answered = list(messages), list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0 if waiting else 60)
        return waiting.pop(0)

    async def send(message: dict[str, Any]) -> None:
        answered.append(message)

    headers = [(b"content-type", FORM["content-type"].encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "query_string": b""}
    asyncio.run(app({**scope, "headers": headers}, receive, send))  # type: ignore[arg-type]
    return answered[0]["status"], answered[1]["body"].decode()


HALF = FILE_HEAD + LINE * (2 * PART_BYTES // len(LINE))


@pytest.mark.parametrize("broken", [True, False])
def test_half_an_upload_leaves_no_file(store: Store, broken: bool) -> None:
    """The connection breaks, or the sender stalls; a part was stored by then."""
    pieces = [HALF[start : start + PARSE_BYTES] for start in range(0, len(HALF), PARSE_BYTES)]
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    if broken:
        messages.append({"type": "http.disconnect"})
    status, body = received(store, *messages, stalled_after_s=0.3)
    expected = (400, "upload_broken_off") if broken else (408, "upload_stalled")
    assert (status, expected[1] in body) == (expected[0], True)
    assert store.file_sweeping.uploading() == []
    assert store.file_sweeping.sweep_files() == 1
    assert is_empty(store)


def test_a_slow_sender_is_refused(store: Store) -> None:
    message = {"type": "http.request", "body": b"-", "more_body": True}

    app = create_app(
        store,
        lambda _: None,
        limits=UploadLimits(stalled_after_s=0.2, least_bytes_per_s=1_000),
    )
    answered: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return message

    async def send(sent: dict[str, Any]) -> None:
        answered.append(sent)

    headers = [(b"content-type", FORM["content-type"].encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "query_string": b""}
    asyncio.run(app({**scope, "headers": headers}, receive, send))  # type: ignore[arg-type]
    assert answered[0]["status"] == 408
    assert b"upload_too_slow" in answered[1]["body"]
    assert is_empty(store)


def test_jobs_and_files_share_their_places(store: Store) -> None:
    """Uploads of jobs hold all of them, so that a file is told to come again."""
    limits = UploadLimits(place_wait_s=0.1, stalled_after_s=1.0)
    app = create_app(store, lambda _: None, served_model="tiny", limits=limits)

    async def send_to(path: str, kind: str, body: bytes) -> int:
        waiting, answered = [body], list[dict[str, Any]]()

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0 if waiting else 60)
            return {"type": "http.request", "body": waiting.pop(), "more_body": True}

        async def send(message: dict[str, Any]) -> None:
            answered.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
        await app({**scope, "headers": [(b"content-type", kind.encode())]}, receive, send)  # type: ignore[arg-type]
        status: int = answered[0]["status"]
        return status

    async def run() -> list[int]:
        jobs = [
            asyncio.create_task(send_to("/v1/jobs", "application/jsonl", LINE * 10_000))
            for _ in range(UPLOADS_AT_ONCE)
        ]
        await asyncio.sleep(0.3)
        return [
            await send_to("/v1/files", FORM["content-type"], HALF),
            *await asyncio.gather(*jobs),
        ]

    assert asyncio.run(run()) == [503] + [408] * UPLOADS_AT_ONCE
    assert is_empty(store)


def test_an_upload_beats_while_nothing_arrives(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the sweeper of another process knows that it goes on."""
    monkeypatch.setattr("nightjar.jobs.api.file_uploads.BEAT_EVERY_S", 0.05)
    counters: list[int] = []
    beat = store.files.beat

    def counted(file_id: str) -> None:
        beat(file_id)
        counters.extend(counter for _, counter in store.file_sweeping.uploading())

    monkeypatch.setattr(store.files, "beat", counted)
    message = {"type": "http.request", "body": HALF, "more_body": True}
    assert received(store, message, message, stalled_after_s=0.5)[0] == 408
    assert len(counters) >= 3
    assert counters == sorted(set(counters))


def test_content_is_not_logged(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    planted = LINE.replace(b'"p"', b'"a planted secret"')
    with caplog.at_level(logging.DEBUG):
        made = upload(client, planted)
        client.get(f"/v1/files/{made['id']}/content")
        client.post("/v1/files", content=planted, headers=FORM)
    assert "file_stored" in [getattr(record, "action", None) for record in caplog.records]
    assert "planted" not in caplog.text

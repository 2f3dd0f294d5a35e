"""Batches over HTTP: OpenAI's object, its states, and what is refused."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from nightjar.jobs.accounts import NewKey
from nightjar.jobs.api import create_app
from nightjar.jobs.api.batch_bodies import MAX_BODY_BYTES
from nightjar.jobs.batch_records import NewBatch
from nightjar.jobs.file_records import FilePurpose, NewFile
from nightjar.jobs.records import DEFAULT_TENANT
from nightjar.jobs.states import Scope
from nightjar.jobs.store import Store
from tests.batches import (
    completions,
    compute_all,
    finalize_all,
    ingest,
    lines_of,
    make,
    read_all,
    upload,
)

FIELDS = {
    *("id", "object", "endpoint", "model", "errors", "input_file_id", "completion_window"),
    *("status", "output_file_id", "error_file_id", "created_at", "in_progress_at", "expires_at"),
    *("finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at"),
    *("cancelled_at", "request_counts", "usage", "metadata"),
    *("strict", "priority", "job_id", "purged_at"),  # Nightjar's own
}


@pytest.fixture
def store(sqlite_url: str, migrated_sqlite_file: Any) -> Iterator[Store]:
    shutil.copy(migrated_sqlite_file, sqlite_url.removeprefix("sqlite:///"))
    opened = Store(sqlite_url)
    yield opened
    opened.close()


@pytest.fixture
def woken() -> list[str]:
    return []


@pytest.fixture
def client(store: Store, woken: list[str]) -> TestClient:
    return TestClient(create_app(store, woken.append, served_model="tiny"))


@pytest.fixture
def file_id(store: Store) -> str:
    return upload(store, lines_of(completions(3)))


def create(client: TestClient, file_id: str, **fields: Any) -> httpx.Response:
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return client.post("/v1/batches", json=body | fields)


def refusal(response: httpx.Response) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 500
    return response.status_code, error["code"], error["param"]


def test_a_batch_from_its_creation_to_its_results(
    client: TestClient, store: Store, file_id: str, woken: list[str]
) -> None:
    made = create(client, file_id, metadata={"night": "밤"}, priority=2).json()
    assert made.keys() == FIELDS
    job_id = made["id"].replace("batch_", "job_")
    assert woken == [job_id]
    assert (made["object"], made["status"], made["model"]) == ("batch", "validating", "tiny")
    assert made["expires_at"] - made["created_at"] in (86_400, 86_401)
    assert (made["job_id"], made["priority"], made["usage"]) == (job_id, 2, None)
    assert made["request_counts"]["total"] == 0

    read_all(ingest(store))
    running = client.get(f"/v1/batches/{made['id']}").json()
    assert (running["status"], running["request_counts"]["total"]) == ("in_progress", 3)
    assert running["in_progress_at"] >= made["created_at"]
    native = client.get(f"/v1/jobs/{job_id}").json()
    assert (native["state"], native["priority"], native["metadata"]) == (
        "queued",
        2,
        {"night": "밤"},
    )
    client.post(f"/v1/jobs/{job_id}/pause")
    assert client.get(f"/v1/batches/{made['id']}").json()["status"] == "in_progress"
    client.post(f"/v1/jobs/{job_id}/resume")

    compute_all(store, store.batches.get(made["id"], "default"))
    assert client.get(f"/v1/batches/{made['id']}").json()["status"] == "finalizing"
    finalize_all(store)
    ended = client.get(f"/v1/batches/{made['id']}").json()
    assert (ended["status"], ended["error_file_id"]) == ("completed", None)
    assert ended["created_at"] <= ended["in_progress_at"] <= ended["finalizing_at"]
    assert ended["finalizing_at"] <= ended["completed_at"]
    assert {ended[f"{name}_at"] for name in ("failed", "expired", "cancelling", "cancelled")} == {
        None
    }
    counts = {"total": 3, "completed": 3, "failed": 0, "cancelled": 0}
    assert ended["request_counts"] == counts
    assert ended["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 15,
    }
    content = client.get(f"/v1/files/{ended['output_file_id']}/content").text
    assert [json.loads(line)["custom_id"] for line in content.splitlines()] == [
        *("row-0", "row-1", "row-2")
    ]
    late = client.post(f"/v1/batches/{made['id']}/cancel")
    assert refusal(late) == (409, "wrong_state", None)
    assert late.headers["x-should-retry"] == "false"


def test_a_file_may_be_deleted_while_its_batch_runs(
    client: TestClient, store: Store, file_id: str
) -> None:
    made = create(client, file_id).json()
    held = client.delete(f"/v1/files/{file_id}")
    assert refusal(held) == (409, "file_in_use", None)
    read_all(ingest(store))
    assert client.delete(f"/v1/files/{file_id}").json()["deleted"]
    compute_all(store, store.batches.get(made["id"], "default"))
    finalize_all(store)
    assert client.get(f"/v1/batches/{made['id']}").json()["status"] == "completed"
    assert refusal(create(client, file_id)) == (404, "unknown_file", "input_file_id")


def test_a_cancel_is_answered_with_cancelling_first(
    client: TestClient, store: Store, file_id: str
) -> None:
    unread, begun = create(client, file_id).json()["id"], create(client, file_id).json()["id"]
    first = client.post(f"/v1/batches/{unread}/cancel").json()
    assert (first["status"], first["cancelled_at"]) == ("cancelling", None)
    read_all(ingest(store))
    second = client.post(f"/v1/batches/{begun}/cancel").json()
    assert (second["status"], second["cancelled_at"]) == ("cancelling", None)
    store.stopping.finish()
    finalize_all(store)
    for batch_id, files in ((unread, 0), (begun, 1)):
        ended = client.get(f"/v1/batches/{batch_id}").json()
        assert ended["status"] == "cancelled"
        assert ended["cancelled_at"] >= ended["cancelling_at"]
        assert (ended["error_file_id"] is not None) == bool(files)
        assert client.post(f"/v1/batches/{batch_id}/cancel").json() == ended


def test_a_bad_file_in_strict_mode(client: TestClient, store: Store) -> None:
    bad = upload(store, b'{"custom_id": "a"}\n')
    made = create(client, bad, strict=True).json()
    read_all(ingest(store))
    failed = client.get(f"/v1/batches/{made['id']}").json()
    assert failed["status"] == "failed"
    assert failed["failed_at"] is not None
    assert failed["errors"]["object"] == "list"
    (error,) = failed["errors"]["data"]
    assert error.keys() == {"code", "line", "message", "param"}
    assert (error["code"], error["line"], error["param"]) == ("missing_field", 1, "method")
    assert refusal(client.post(f"/v1/batches/{made['id']}/cancel")) == (409, "wrong_state", None)


def test_listing(client: TestClient, store: Store, file_id: str) -> None:
    empty = client.get("/v1/batches").json()
    assert empty == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    made = [create(client, file_id).json()["id"] for _ in range(5)][::-1]
    listed: list[str] = []
    page = client.get("/v1/batches", params={"limit": 2}).json()
    while True:
        ids = [batch["id"] for batch in page["data"]]
        assert (page["first_id"], page["last_id"]) == (ids[0], ids[-1])
        listed += ids
        if not page["has_more"]:
            break
        page = client.get("/v1/batches", params={"limit": 2, "after": ids[-1]}).json()
    assert sorted(listed) == sorted(made)
    behind = client.get("/v1/batches", params={"after": listed[-1]}).json()
    assert (behind["data"], behind["has_more"]) == ([], False)


@pytest.mark.parametrize("limit", ["-1", "0", "101", "ten", ""])
def test_bad_limits(client: TestClient, limit: str) -> None:
    response = client.get("/v1/batches", params={"limit": limit})
    assert refusal(response) == (400, "invalid_parameter", "limit")


def test_a_list_goes_on_behind_its_own_batches_alone(
    client: TestClient, store: Store, file_id: str
) -> None:
    other = make(store, lines_of(completions(1)), tenant="other")
    for after in (other.id, file_id, "job_1", "batch_1", "", "x" * 99, "batch_\x00", "batch_가"):
        response = client.get("/v1/batches", params={"after": after})
        assert refusal(response) == (400, "invalid_after", "after")


def test_another_tenants_batch_and_file_do_not_exist(client: TestClient, store: Store) -> None:
    other = make(store, lines_of(completions(1)), tenant="other")
    for response in (
        client.get(f"/v1/batches/{other.id}"),
        client.post(f"/v1/batches/{other.id}/cancel"),
        client.get("/v1/batches/batch_unknown"),
        client.post("/v1/batches/job_unknown/cancel"),
        client.get(f"/v1/batches/{other.job_id}"),
        client.get("/v1/batches/batch_%00"),
    ):
        assert refusal(response) == (404, "unknown_batch", None)
    assert store.batches.get(other.id, "other").cancelling_at is None
    theirs = create(client, other.input_file_id)
    missing = create(client, "file-unknown")
    assert refusal(theirs) == refusal(missing) == (404, "unknown_file", "input_file_id")
    for answer, id_ in ((theirs, other.input_file_id), (missing, "file-unknown")):
        text = answer.json()["error"]["message"].replace(id_, "ID")
        assert text == "input_file_id: there is no file 'ID', or its upload has not ended"
    assert client.get("/v1/batches").json()["data"] == []


def test_files_that_a_batch_cannot_have(client: TestClient, store: Store) -> None:
    uploading = store.files.begin(NewFile("default", "in.jsonl"))
    store.files.append(uploading, 0, b"{}\n")
    assert refusal(create(client, uploading)) == (404, "unknown_file", "input_file_id")
    output = store.database.write(
        lambda connection: store.files.add_result_file(
            connection, "default", "job_1", "succeeded", 3, "out.jsonl", None
        )
    )
    assert store.files.get(output, "default").purpose is FilePurpose.BATCH_OUTPUT
    assert refusal(create(client, output)) == (400, "invalid_file_purpose", "input_file_id")
    for odd in ("file\x00", "x" * 200, "가"):
        assert refusal(create(client, odd)) == (404, "unknown_file", "input_file_id")


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "invalid_value", "endpoint"),
        ({"endpoint": "/v1/rerank\x00"}, "invalid_value", "endpoint"),
        ({"endpoint": ["/v1/rerank"]}, "invalid_value", "endpoint"),
        ({"endpoint": None}, "missing_required_parameter", "endpoint"),
        ({"input_file_id": None}, "missing_required_parameter", "input_file_id"),
        ({"input_file_id": ""}, "invalid_value", "input_file_id"),
        ({"input_file_id": 7}, "invalid_value", "input_file_id"),
        ({"model": "other"}, "model_not_found", "model"),
        ({"model": "\x00"}, "invalid_value", "model"),
        ({"completion_window": "soon"}, "invalid_completion_window", "completion_window"),
        ({"completion_window": "0h"}, "invalid_completion_window", "completion_window"),
        ({"completion_window": 24}, "invalid_value", "completion_window"),
        ({"metadata": {str(n): "v" for n in range(10_001)}}, "invalid_metadata", "metadata"),
        ({"metadata": {"k": "v" * 513}}, "invalid_metadata", "metadata"),
        ({"metadata": {"k": 1}}, "invalid_metadata", "metadata"),
        ({"metadata": [["k", "v"]]}, "invalid_metadata", "metadata"),
        ({"metadata": {"k": "\ud800"}}, "invalid_metadata", "metadata"),
        ({"strict": "yes"}, "invalid_value", "strict"),
        ({"priority": 10}, "invalid_value", "priority"),
        ({"priority": True}, "invalid_value", "priority"),
        ({"output_expires_after": 3_600}, "invalid_value", "output_expires_after"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            "invalid_value",
            "output_expires_after.seconds",
        ),
        (
            {"output_expires_after": {"anchor": "tomorrow", "seconds": 3_600}},
            "invalid_value",
            "output_expires_after.anchor",
        ),
        ({"webhook": "http://127.0.0.1"}, "unknown_parameter", "webhook"),
    ],
)
def test_bad_fields(
    client: TestClient, store: Store, file_id: str, fields: dict[str, Any], code: str, param: str
) -> None:
    body = {"input_file_id": file_id, "endpoint": "/v1/completions"} | fields
    response = client.post("/v1/batches", content=json.dumps(body))
    assert refusal(response) == (404 if code == "model_not_found" else 400, code, param)
    assert store.batches.newest(1, "default") == []


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b"null", 400, "invalid_json"),
        (b'{"metadata": ' + b"[" * 100_000, 400, "invalid_json"),
        (b'{"priority": ' + b"9" * 5_000 + b"}", 400, "invalid_json"),
        (b'{"endpoint": "\xff"}', 400, "invalid_encoding"),
        (b" " * (MAX_BODY_BYTES + 1), 413, "body_too_large"),
    ],
)
def test_bodies_that_are_no_object(
    client: TestClient, content: bytes, status: int, code: str
) -> None:
    assert refusal(client.post("/v1/batches", content=content)) == (status, code, None)


def test_a_compressed_body_is_refused(client: TestClient) -> None:
    response = client.post("/v1/batches", content=b"x", headers={"Content-Encoding": "gzip"})
    assert refusal(response) == (415, "unsupported_encoding", "Content-Encoding")


def test_null_stands_for_the_default(client: TestClient, file_id: str) -> None:
    response = create(client, file_id, metadata=None, output_expires_after=None, strict=None)
    assert response.status_code == 200
    assert (response.json()["metadata"], response.json()["strict"]) == ({}, False)


def test_a_value_of_metadata_may_be_empty(client: TestClient, file_id: str) -> None:
    assert create(client, file_id, metadata={"note": ""}).json()["metadata"] == {"note": ""}


def test_every_kind_of_request_may_be_named(client: TestClient, file_id: str) -> None:
    for endpoint in ("/v1/completions", "/v1/chat/completions", "/v1/rerank"):
        assert create(client, file_id, endpoint=endpoint).json()["endpoint"] == endpoint


def test_without_the_broker_a_batch_is_made_all_the_same(store: Store, file_id: str) -> None:
    def away(_: str) -> None:
        raise ConnectionError

    client = TestClient(create_app(store, away))
    made = create(client, file_id)
    assert (made.status_code, made.json()["model"]) == (200, None)


def test_a_key_to_read_makes_and_cancels_nothing(store: Store, file_id: str) -> None:
    key, _ = store.accounts.create_key(NewKey(DEFAULT_TENANT, Scope.READ))
    client = TestClient(
        create_app(store, lambda _: None), headers={"Authorization": f"Bearer {key}"}
    )
    made = store.batches.create(NewBatch("/v1/completions", file_id))
    assert refusal(create(client, file_id)) == (403, "scope_too_small", None)
    assert refusal(client.post(f"/v1/batches/{made.id}/cancel")) == (403, "scope_too_small", None)
    assert client.get(f"/v1/batches/{made.id}").status_code == 200
    assert len(client.get("/v1/batches").json()["data"]) == 1


def test_the_description_of_the_body_is_whole(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    body = document["paths"]["/v1/batches"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/CreateBatch"}
    schemas = document["components"]["schemas"]
    assert schemas["CreateBatch"]["required"] == ["input_file_id", "endpoint"]
    properties = schemas["CreateBatch"]["properties"]
    assert set(properties) >= {"output_expires_after", "strict", "metadata"}
    assert properties["metadata"]["anyOf"][0]["maxProperties"] == 16
    assert schemas["OutputExpiry"]["properties"]["seconds"]["minimum"] == 3_600

"""Webhooks over HTTP: made, shown without their secret, followed, redelivered, deleted."""

import base64
import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from nightjar.jobs.accounts import NewKey, Tenant
from nightjar.jobs.api import create_app
from nightjar.jobs.events import Attempt
from nightjar.jobs.states import Scope
from nightjar.jobs.store import Store
from nightjar.jobs.webhooks.addresses import AddressGuard
from tests.jobs import planned
from tests.outcomes import compute

URL = "https://example.org/nightjar"


@pytest.fixture
def store(sqlite_tables: str) -> Iterator[Store]:
    opened = Store(sqlite_tables)
    yield opened
    opened.close()


def public(host: str, port: int) -> list[str]:
    return {"private.example": ["10.0.0.7"], "unknown.example": []}.get(host, ["93.184.216.34"])


def app_of(store: Store) -> FastAPI:
    return create_app(store, lambda job_id: None, guard=AddressGuard(resolver=public))


@pytest.fixture
def client(store: Store) -> Iterator[TestClient]:
    with TestClient(app_of(store)) as opened:
        yield opened


def client_as(store: Store, tenant: str, scope: Scope) -> TestClient:
    """A client with a key."""
    if tenant not in {one.name for one in store.accounts.tenants()}:
        store.accounts.create_tenant(Tenant(tenant))
    key, _ = store.accounts.create_key(NewKey(tenant, scope))
    return TestClient(app_of(store), headers={"Authorization": f"Bearer {key}"})


def finish_job(store: Store) -> str:
    job_id, (ref,) = planned(store, 1)
    compute(store, ref)
    return job_id


def test_the_secret_is_shown_once(client: TestClient) -> None:
    answer = client.post("/v1/webhooks", json={"url": URL, "events": ["job.failed"]})
    made = answer.json()
    assert answer.status_code == 201
    secret = made.pop("secret")
    assert secret.startswith("whsec_")
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    assert (made["object"], made["url"], made["events"]) == ("webhook", URL, ["job.failed"])
    assert client.get(f"/v1/webhooks/{made['id']}").json() == made
    listed = client.get("/v1/webhooks")
    assert listed.json()["data"] == [made]
    assert secret not in listed.text


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1/", "https"),
        ("https://127.0.0.1/", "not public"),
        ("https://private.example/", "not public"),
        ("https://unknown.example/", "does not resolve"),
        ("https://user:word@example.org/", "no user"),
    ],
)
def test_a_url_that_may_not_be_called_is_refused(
    client: TestClient, store: Store, url: str, why: str
) -> None:
    if "127" in url:
        client = TestClient(create_app(store, lambda job_id: None))
    answer = client.post("/v1/webhooks", json={"url": url})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "invalid_webhook_url",
        "url",
    )
    assert error["type"] == "invalid_request_error"
    assert why in error["message"]
    assert "10.0.0.7" not in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", "body"),
        (b"[]", "body"),
        (b"{", "body"),
        (b'{"url": 1}', "body.url"),
        (b"{}", "body.url"),
        (b'{"url": "https://a.b/", "event": []}', "body.event"),
        (b'{"url": "https://a.b/", "events": ["job.began"]}', "body.events.0"),
        (b'{"url": "https://a.b/", "events": "job.failed"}', "body.events"),
        (b'{"url": "\xff"}', "body"),
        (b'{"a":' * 10_000, "body"),
    ],
)
def test_a_body_that_cannot_be_used_is_refused(client: TestClient, body: bytes, param: str) -> None:
    answer = client.post("/v1/webhooks", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_body", param)


def test_a_large_body_is_refused_before_it_is_read(client: TestClient) -> None:
    answer = client.post("/v1/webhooks", content=b" " * 70_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_a_compressed_body_is_refused(client: TestClient) -> None:
    sent = {"content-encoding": "gzip"}
    answer = client.post("/v1/webhooks", content=b"\x1f\x8b", headers=sent)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")


def test_a_slow_server_of_names_holds_only_some_threads(store: Store) -> None:
    release, asked = threading.Event(), threading.Semaphore(0)

    def slow(host: str, port: int) -> list[str]:
        asked.release()
        assert release.wait(20)
        return ["93.184.216.34"]

    app = create_app(store, lambda job_id: None, guard=AddressGuard(resolver=slow))
    with TestClient(app) as client, ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(client.post, "/v1/webhooks", json={"url": URL}) for _ in range(4)]
        for _ in waiting:
            assert asked.acquire(timeout=20)
        refused = client.post("/v1/webhooks", json={"url": URL})
        release.set()
        assert [one.result().status_code for one in waiting] == [201] * 4
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "webhooks_busy")
        assert client.post("/v1/webhooks", json={"url": URL}).status_code == 201


def test_too_many_webhooks(client: TestClient) -> None:
    statuses = [client.post("/v1/webhooks", json={"url": URL}).status_code for _ in range(17)]
    assert statuses == [201] * 16 + [409]
    page = client.get("/v1/webhooks", params={"limit": 10}).json()
    assert (len(page["data"]), page["has_more"]) == (10, True)
    rest = client.get("/v1/webhooks", params={"limit": 10, "after": page["next_after"]}).json()
    assert (len(rest["data"]), rest["has_more"]) == (6, False)
    assert {one["id"] for one in page["data"]}.isdisjoint(one["id"] for one in rest["data"])


def test_deliveries_in_pages_and_again_by_hand(client: TestClient, store: Store) -> None:
    webhook = client.post("/v1/webhooks", json={"url": URL}).json()
    jobs = [finish_job(store) for _ in range(3)]
    url = f"/v1/webhooks/{webhook['id']}/deliveries"
    page = client.get(url, params={"limit": 2}).json()
    assert [one["job_id"] for one in page["data"]] == jobs[:0:-1]
    assert page["has_more"]
    rest = client.get(url, params={"limit": 2, "after": page["next_after"]}).json()
    assert [one["job_id"] for one in rest["data"]] == jobs[:1]
    (claimed,) = store.deliveries.claim(1, 60.0)
    store.deliveries.record(claimed, Attempt(500, "answered 500"))
    (failed,) = (one for one in client.get(url).json()["data"] if one["id"] == claimed.id)
    assert (failed["state"], failed["attempts"], failed["last_status"]) == ("failed", 1, 500)
    assert (failed["last_reason"], failed["next_at"]) == ("answered 500", None)
    again = client.post(f"/v1/webhooks/deliveries/{claimed.id}/redeliver")
    assert again.status_code == 200
    assert (again.json()["state"], again.json()["event_id"]) == ("waiting", claimed.event_id)


def test_switching_off_and_on(client: TestClient, store: Store) -> None:
    id_ = client.post("/v1/webhooks", json={"url": URL}).json()["id"]
    off = client.post(f"/v1/webhooks/{id_}", json={"enabled": False}).json()
    assert (off["enabled"], off["disabled_reason"]) == (False, "switched off by hand")
    finish_job(store)
    assert client.get(f"/v1/webhooks/{id_}/deliveries").json()["data"] == []
    on = client.post(f"/v1/webhooks/{id_}", json={"enabled": True}).json()
    assert (on["enabled"], on["disabled_reason"]) == (True, None)


def test_deleting(client: TestClient) -> None:
    id_ = client.post("/v1/webhooks", json={"url": URL}).json()["id"]
    gone = client.delete(f"/v1/webhooks/{id_}")
    assert gone.json() == {"id": id_, "object": "webhook", "deleted": True}
    for answer in (client.get(f"/v1/webhooks/{id_}"), client.delete(f"/v1/webhooks/{id_}")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_webhook")


def test_another_tenants_webhook_is_unknown_and_scopes_hold(store: Store) -> None:
    owner = client_as(store, "owner", Scope.ADMIN)
    id_ = owner.post("/v1/webhooks", json={"url": URL}).json()["id"]
    stranger = client_as(store, "stranger", Scope.ADMIN)
    assert stranger.get("/v1/webhooks").json()["data"] == []
    for method, path, body in (
        ("GET", f"/v1/webhooks/{id_}", None),
        ("GET", f"/v1/webhooks/{id_}/deliveries", None),
        ("POST", f"/v1/webhooks/{id_}", {"enabled": False}),
        ("DELETE", f"/v1/webhooks/{id_}", None),
    ):
        assert stranger.request(method, path, json=body).status_code == 404
    reader = client_as(store, "owner", Scope.SUBMIT)
    assert reader.get(f"/v1/webhooks/{id_}").status_code == 200
    for method, path, body in (
        ("POST", "/v1/webhooks", {"url": URL}),
        ("POST", f"/v1/webhooks/{id_}", {"enabled": False}),
        ("DELETE", f"/v1/webhooks/{id_}", None),
        ("POST", "/v1/webhooks/deliveries/whd_1/redeliver", None),
    ):
        answer = reader.request(method, path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "scope_too_small")


@pytest.mark.parametrize("id_", ["nope", "%00", "x" * 300, "%ff", "..%2f.."])
def test_ids_that_no_webhook_has(client: TestClient, id_: str) -> None:
    for answer in (
        client.get(f"/v1/webhooks/{id_}"),
        client.get(f"/v1/webhooks/{id_}/deliveries"),
        client.post(f"/v1/webhooks/deliveries/{id_}/redeliver"),
    ):
        assert answer.status_code == 404
        assert json.loads(answer.text)["error"]["type"] == "not_found_error"


def test_no_secret_is_logged(
    client: TestClient, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = client.post("/v1/webhooks", json={"url": URL}).json()["secret"]
    finish_job(store)
    (claimed,) = store.deliveries.claim(1, 60.0)
    assert claimed.secret == secret
    assert secret.removeprefix("whsec_") not in caplog.text

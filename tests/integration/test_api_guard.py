"""A page in somebody's browser can neither change nor list anything through a loopback address."""

import json
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from nightjar.jobs.api import create_app
from nightjar.jobs.store import Store
from tests.jobs import planned

LOCAL = "http://127.0.0.1:8000"
ROW = json.dumps(
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}}
)


@pytest.fixture
def store(sqlite_tables: str) -> Iterator[Store]:
    opened = Store(sqlite_tables)
    yield opened
    opened.close()


def client_of(store: Store, *hosts: str) -> TestClient:
    app = create_app(store, lambda job_id: None, served_model="tiny", trusted_hosts=hosts)
    return TestClient(app, base_url=LOCAL)


FOREIGN = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:9999"},
    {"origin": "http://[bad"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"referer": "https://evil.example/page"},
]


@pytest.mark.parametrize("headers", FOREIGN)
@pytest.mark.parametrize("kind", ["text/plain", "application/jsonl"])
def test_a_foreign_page_changes_nothing(store: Store, headers: dict[str, str], kind: str) -> None:
    job_id, _ = planned(store, 1)
    client = client_of(store)
    sent = {**headers, "content-type": kind}
    for path in ("", f"/{job_id}/cancel", f"/{job_id}/pause", f"/{job_id}/retry"):
        response = client.post(f"/v1/jobs{path}", content=ROW, headers=sent)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "foreign_origin")
    assert [job.id for job in store.jobs.newest()] == [job_id]
    assert store.jobs.get(job_id).state == "queued"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example"])
def test_a_name_that_somebody_else_registered_is_refused(store: Store, host: str) -> None:
    """It may resolve to a loopback address: the page would then read the answers, too."""
    client = client_of(store)
    for path in ("/v1/jobs", "/health"):
        response = client.get(path, headers={"host": host})
        assert (response.status_code, response.json()["error"]["code"]) == (421, "untrusted_host")
        assert "NIGHTJAR_TRUSTED_HOSTS" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "api", "10.0.0.7:80", "a.localhost"]
)
def test_our_own_names_and_addresses_are_taken(store: Store, host: str) -> None:
    assert client_of(store).get("/v1/jobs", headers={"host": host}).status_code == 200


def test_a_host_that_is_named_in_the_settings(store: Store) -> None:
    named = {"host": "Night.example.org:443"}
    assert client_of(store, "night.example.org").get("/v1/jobs", headers=named).status_code == 200
    assert client_of(store, "*").get("/v1/jobs", headers=named).status_code == 200
    # A proxy that gives the API another host than the page's own.
    proxied = {"origin": "https://night.example.org", "content-type": "application/jsonl"}
    client = client_of(store, "night.example.org")
    assert client.post("/v1/jobs", content=ROW, headers=proxied).status_code == 201


def test_its_own_origin_and_what_is_no_browser_may_submit(store: Store) -> None:
    """What curl --data-binary sends says that it is a form."""
    client = client_of(store)
    same = {"origin": LOCAL, "sec-fetch-site": "same-origin", "content-type": "text/plain"}
    curl = {"content-type": "application/x-www-form-urlencoded"}
    for headers in (same, curl):
        assert client.post("/v1/jobs", content=ROW, headers=headers).status_code == 201
    foreign = {**curl, "origin": "https://evil.example"}
    assert client.post("/v1/jobs", content=ROW, headers=foreign).status_code == 403

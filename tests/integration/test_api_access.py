"""Every route of the real application, without a key, with too small a one, with another's id.

A route that is not in CALLS fails the first test: say there what scope it needs and how it is
called. An id in a path that is not in IDS fails it, too.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from nightjar.jobs.accounts import NewKey, Tenant
from nightjar.jobs.api.key_ring import Access
from nightjar.jobs.records import NewJob, NewRequest
from nightjar.jobs.states import RequestKind, Scope
from nightjar.jobs.store import Store
from nightjar.pipeline.front.api_server import _celery, application
from nightjar.pipeline.settings import Settings

VERBS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")
OPEN = {(verb, path) for verb in ("GET", "HEAD") for path in ("/health", "/docs", "/openapi.json")}
ROW = (
    b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", '
    b'"body": {"prompt": "p", "max_tokens": 4}}'
)


@dataclass(frozen=True, slots=True)
class Call:
    """How a route is called so that only the key or the id can be what is wrong."""

    scope: Scope
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)


_JOB = "/v1/jobs/{job_id}"
CALLS: dict[tuple[str, str], Call] = {
    ("GET", "/v1/jobs"): Call(Scope.READ),
    ("POST", "/v1/jobs"): Call(Scope.SUBMIT, ROW, {"content-type": "application/jsonl"}),
    ("GET", _JOB): Call(Scope.READ),
    **{("GET", f"{_JOB}/{part}"): Call(Scope.READ) for part in ("results", "output", "errors")},
    **{
        ("POST", f"{_JOB}/{verb}"): Call(Scope.SUBMIT)
        for verb in ("cancel", "pause", "resume", "retry")
    },
}


def make_job(store: Store, tenant: str) -> str:
    with store.jobs.submit(NewJob("demo", tenant=tenant)) as arriving:
        body = {"prompt": f"a secret of {tenant}", "max_tokens": 4}
        arriving.add([NewRequest(0, 1, f"row of {tenant}", RequestKind.GENERATE, body)])
    return arriving.job_id


# Name in a path -> makes one that belongs to a tenant, and one that nobody has.
IDS: dict[str, tuple[Callable[[Store, str], str], str]] = {
    "job_id": (make_job, "job_0199aabbccddeeff00112233"),
}


def routes(app: FastAPI) -> set[tuple[str, str]]:
    """(verb, path) of every route; what is no plain route has the verb `?`."""
    found = set()
    for route in app.routes:
        included = getattr(route, "effective_route_contexts", None)
        for one in included() if included else [route]:
            verbs = getattr(one, "methods", None) or {"?"}
            found |= {(verb, str(one.path)) for verb in verbs}
    return found


def unknown(app: FastAPI) -> set[tuple[str, str]]:
    """Routes that this test cannot call."""
    return {
        (verb, path)
        for verb, path in routes(app) - OPEN
        if (verb, path) not in CALLS or not set(names_in(path)) <= IDS.keys()
    }


def names_in(path: str) -> list[str]:
    return re.findall(r"{(\w+)[^}]*}", path)


@pytest.fixture
def store(sqlite_url: str, migrated_sqlite_file: Path) -> Iterator[Store]:
    shutil.copy(migrated_sqlite_file, sqlite_url.removeprefix("sqlite:///"))
    opened = Store(sqlite_url)
    for name in ("owls", "bats"):
        opened.accounts.create_tenant(Tenant(name))
    yield opened
    opened.close()


def real_app(store: Store) -> FastAPI:
    """As `nightjar api` makes it; nobody is at the broker."""
    settings = Settings(model_name="demo", broker_url="redis://127.0.0.1:1/0")
    return application(settings, store, _celery(settings), Access())


@pytest.fixture
def client(store: Store) -> Iterator[TestClient]:
    with TestClient(real_app(store)) as opened:
        yield opened


def key_of(store: Store, tenant: str, scope: Scope) -> dict[str, str]:
    key, _ = store.accounts.create_key(NewKey(tenant, scope))
    return {"Authorization": f"Bearer {key}"}


def send(  # type: ignore[no-untyped-def]
    client: TestClient, verb: str, path: str, key: dict[str, str]
):
    call = CALLS[verb, path]
    url = re.sub(r"{(\w+)[^}]*}", lambda name: IDS[name[1]][1], path)
    return client.request(
        verb, url, content=call.body, params=call.query, headers={**call.headers, **key}
    )


def with_id(path: str, made: str) -> str:
    (name,) = names_in(path)
    return re.sub(rf"{{{name}[^}}]*}}", made, path)


def test_every_route_is_known_here(store: Store) -> None:
    app = real_app(store)
    assert unknown(app) == set()
    assert set(CALLS) <= routes(app)  # of routes that are gone

    @app.get("/v1/jobs/{job_id}/new")
    def new(job_id: str) -> str:
        return job_id

    app.add_api_websocket_route("/v1/stream", new)
    assert unknown(app) == {("GET", "/v1/jobs/{job_id}/new"), ("?", "/v1/stream")}


def test_every_route_and_verb_needs_a_key(client: TestClient, store: Store) -> None:
    key_of(store, "owls", Scope.READ)
    paths = {path for _, path in CALLS} | {"/", "/v1", "/v1/nothing", "/health/", "//health"}
    for path in sorted(paths):
        url = re.sub(r"{(\w+)[^}]*}", lambda name: IDS[name[1]][1], path)
        for verb in VERBS:
            refused = client.request(verb, url)
            assert refused.status_code == 401, (verb, path)
            assert refused.headers["www-authenticate"] == 'Bearer realm="nightjar"'
            if verb != "HEAD":
                error = refused.json()["error"]
                assert (error["code"], error["type"]) == ("missing_api_key", "authentication_error")
    for verb in ("POST", "PUT", "PATCH", "DELETE"):
        assert client.request(verb, "/health").status_code == 401


def test_every_route_needs_its_scope(client: TestClient, store: Store) -> None:
    order = list(Scope)
    for (verb, path), call in CALLS.items():
        for scope in order[: order.index(call.scope)]:
            refused = send(client, verb, path, key_of(store, "owls", scope))
            assert refused.status_code == 403, (verb, path, scope)
            assert refused.json()["error"]["code"] == "scope_too_small"
            assert repr(call.scope.value) in refused.json()["error"]["message"]
    # A verb that changes something needs more than to read, whatever the route says.
    assert client.delete("/v1/new", headers=key_of(store, "owls", Scope.READ)).status_code == 403


def test_what_is_anothers_does_not_exist(client: TestClient, store: Store) -> None:
    """The words are those for an id that nobody has. One's own is there."""
    key = key_of(store, "owls", Scope.ADMIN)
    for (verb, path), call in CALLS.items():
        for name in names_in(path):
            make, nobodys = IDS[name]
            foreign, mine = make(store, "bats"), make(store, "owls")
            answers = [
                client.request(
                    verb,
                    with_id(path, one),
                    content=call.body,
                    params=call.query,
                    headers={**call.headers, **key},
                )
                for one in (foreign, nobodys, mine)
            ]
            assert [one.status_code for one in answers[:2]] == [404, 404], (verb, path)
            assert answers[0].text.replace(foreign, "ID") == answers[1].text.replace(nobodys, "ID")
            assert answers[2].status_code != 404, (verb, path)
    states = {job.state.value for job in store.jobs.newest(99, tenant="bats")}
    assert states == {"queued"}  # nothing was done to them


def test_lists_hold_ones_own_alone(client: TestClient, store: Store) -> None:
    key = key_of(store, "owls", Scope.READ)
    made = [(make(store, "owls"), make(store, "bats")) for make, _ in IDS.values()]
    lists = [path for verb, path in CALLS if verb == "GET" and not names_in(path)]
    shown = "".join(send(client, "GET", path, key).text for path in lists)
    for mine, foreign in made:
        assert mine in shown
        assert foreign not in shown
    page = client.get("/v1/jobs", params={"after": made[0][1]}, headers=key)
    assert made[0][1] not in page.text


def test_a_new_route_need_not_think_of_tenants(store: Store) -> None:
    app = real_app(store)

    @app.get("/v1/jobs/{job_id}/new")
    def new(job_id: str) -> str:
        return store.jobs.get(job_id).model

    foreign, mine = make_job(store, "bats"), make_job(store, "owls")
    key = key_of(store, "owls", Scope.READ)
    with TestClient(app) as client:
        for _ in range(2):  # the second time the owner is known
            assert client.get(f"/v1/jobs/{foreign}/new", headers=key).status_code == 404
            assert client.get(f"/v1/jobs/{mine}/new", headers=key).json() == "demo"


@pytest.mark.parametrize(
    "name",
    ["OpenAI-Organization", "OpenAI-Project", "X-Tenant", "X-Tenant-Id", "X-Forwarded-User"],
)
def test_a_header_that_names_a_tenant_changes_nothing(
    client: TestClient, store: Store, name: str
) -> None:
    key = key_of(store, "owls", Scope.SUBMIT) | {name: "bats"}
    foreign = make_job(store, "bats")
    assert client.get("/v1/jobs", headers=key).json()["data"] == []
    assert client.get(f"/v1/jobs/{foreign}", headers=key).status_code == 404
    sent = client.post(
        "/v1/jobs?tenant=bats", content=ROW, headers={**key, "content-type": "text/plain"}
    )
    assert sent.status_code == 201
    assert store.jobs.get(sent.json()["id"]).tenant == "owls"


def test_what_is_open_says_nothing_of_jobs(client: TestClient, store: Store) -> None:
    key_of(store, "owls", Scope.READ)
    job_id = make_job(store, "owls")
    for verb, path in sorted(OPEN - {("HEAD", "/health"), ("HEAD", "/docs")}):
        answer = client.request(verb, path)
        assert answer.status_code == 200, (verb, path)
        for word in (job_id, "owls", "bats", "row of", "a secret"):
            assert word not in answer.text
    assert set(client.get("/health").json()) == {"status", "version", "parts"}

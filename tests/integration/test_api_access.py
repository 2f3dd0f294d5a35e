"""Every route of the real application, without a key, with too small a one, with another's id.

A route that is not in CALLS fails the first test: say there what scope it needs and how it is
called. An id in a path that is not in IDS fails it, too.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from nightjar.jobs.accounts import NewKey, Tenant
from nightjar.jobs.api import create_app
from nightjar.jobs.api.key_ring import Access
from nightjar.jobs.batch_records import NewBatch, job_id_of
from nightjar.jobs.errors import StoreUnavailableError
from nightjar.jobs.events import NewWebhook, new_id
from nightjar.jobs.file_records import NewFile
from nightjar.jobs.models import PlannedModel
from nightjar.jobs.records import NewJob, NewRequest
from nightjar.jobs.schedule_records import FAILING_AFTER, RunEnd, RunState
from nightjar.jobs.states import RequestKind, Scope
from nightjar.jobs.store import Store
from tests.api_app import real_app
from tests.schedules import Clock, add_schedule

VERBS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")
OPEN = {(verb, path) for verb in ("GET", "HEAD") for path in ("/health", "/docs", "/openapi.json")}
OPEN |= {("?", "/ui")}  # the page: test_page.py walks it
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


READ = Scope.READ
_JSON = {"content-type": "application/json"}
_FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    + ROW
    + b"\r\n--x--\r\n"
)
_BATCH = b'{"input_file_id": "file-nobodys", "endpoint": "/v1/completions"}'
_RANKING = b'{"query": "q", "documents": ["a"]}'
_JOB = "/v1/jobs/{job_id}"
_FILE = "/v1/files/{file_id}"
_HOOK = "/v1/webhooks/{webhook_id}"
_SCHEDULE = "/v1/schedules/{schedule}"
_NIGHTLY = b'{"cron": "0 2 * * *", "task": "rank.toml"}'
CALLS: dict[tuple[str, str], Call] = {
    ("GET", "/v1/jobs"): Call(Scope.READ),
    ("POST", "/v1/jobs"): Call(Scope.SUBMIT, ROW, {"content-type": "application/jsonl"}),
    ("GET", _JOB): Call(Scope.READ),
    **{
        ("GET", f"{_JOB}/{part}"): Call(Scope.READ)
        for part in ("results", "output", "errors", "report", "report.html")
    },
    **{
        ("POST", f"{_JOB}/{verb}"): Call(Scope.SUBMIT)
        for verb in ("cancel", "pause", "resume", "retry")
    },
    ("POST", "/v1/jobs/open"): Call(Scope.SUBMIT),
    ("POST", f"{_JOB}/rows"): Call(
        Scope.SUBMIT, ROW, {"content-type": "application/jsonl"}, {"first": "0"}
    ),
    ("POST", f"{_JOB}/seal"): Call(Scope.SUBMIT),
    ("GET", "/v1/files"): Call(Scope.READ),
    ("POST", "/v1/files"): Call(
        Scope.SUBMIT, _FORM, {"content-type": "multipart/form-data; boundary=x"}
    ),
    ("GET", _FILE): Call(Scope.READ),
    ("GET", f"{_FILE}/content"): Call(Scope.READ),
    ("DELETE", _FILE): Call(Scope.SUBMIT),
    ("GET", "/v1/batches"): Call(Scope.READ),
    ("POST", "/v1/batches"): Call(Scope.SUBMIT, _BATCH, _JSON),
    ("GET", "/v1/batches/{batch_id}"): Call(Scope.READ),
    ("POST", "/v1/batches/{batch_id}/cancel"): Call(Scope.SUBMIT),
    ("POST", "/v1/completions"): Call(Scope.SUBMIT, b'{"prompt": "p"}', _JSON),
    ("POST", "/v1/chat/completions"): Call(
        Scope.SUBMIT, b'{"messages": [{"role": "user", "content": "p"}]}', _JSON
    ),
    **{
        ("POST", path): Call(Scope.SUBMIT, _RANKING, _JSON)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    },
    ("GET", "/metrics"): Call(Scope.ADMIN),
    ("GET", "/v1/models"): Call(Scope.READ),
    ("GET", "/v1/models/{model:path}"): Call(Scope.READ),
    ("GET", "/v1/schedules"): Call(Scope.READ),
    ("GET", "/v1/schedules/check"): Call(Scope.READ),
    ("GET", "/v1/schedules/changes"): Call(Scope.READ),
    ("GET", _SCHEDULE): Call(Scope.READ),
    ("PUT", _SCHEDULE): Call(Scope.ADMIN, _NIGHTLY, _JSON),
    ("PATCH", _SCHEDULE): Call(Scope.ADMIN, b'{"cron": "0 3 * * *"}', _JSON),
    ("DELETE", _SCHEDULE): Call(Scope.ADMIN),
    ("GET", f"{_SCHEDULE}/runs"): Call(Scope.READ),
    **{("POST", f"{_SCHEDULE}/{verb}"): Call(Scope.SUBMIT) for verb in ("pause", "resume", "run")},
    ("GET", "/v1/webhooks"): Call(Scope.READ),
    ("POST", "/v1/webhooks"): Call(Scope.ADMIN, b'{"url": "https://example.org/x"}', _JSON),
    ("GET", _HOOK): Call(Scope.READ),
    ("POST", _HOOK): Call(Scope.ADMIN, b'{"enabled": true}', _JSON),
    ("DELETE", _HOOK): Call(Scope.ADMIN),
    ("GET", f"{_HOOK}/deliveries"): Call(Scope.READ),
    ("POST", "/v1/webhooks/deliveries/{delivery_id}/redeliver"): Call(Scope.ADMIN),
}


def make_job(store: Store, tenant: str) -> str:
    with store.jobs.submit(NewJob("demo", tenant=tenant)) as arriving:
        body = {"prompt": f"a secret of {tenant}", "max_tokens": 4}
        arriving.add([NewRequest(0, 1, f"row of {tenant}", RequestKind.GENERATE, body)])
    return arriving.job_id


def make_file(store: Store, tenant: str) -> str:
    file_id = store.files.begin(NewFile(tenant, "in.jsonl"))
    store.files.append(file_id, 0, ROW)
    return store.files.end(file_id, len(ROW), hashlib.sha256(ROW).hexdigest()).id


def make_batch(store: Store, tenant: str) -> str:
    return store.batches.create(
        NewBatch("/v1/completions", make_file(store, tenant), tenant=tenant)
    ).id


def make_webhook(store: Store, tenant: str) -> str:
    return store.webhooks.add(NewWebhook(tenant, "https://example.org/x", (), "whsec_c2VjcmV0")).id


def make_delivery(store: Store, tenant: str) -> str:
    webhook_id = make_webhook(store, tenant)
    store.stopping.cancel(make_job(store, tenant))
    (delivery,) = store.deliveries.newest(webhook_id, 2)
    return delivery.id


def make_schedule(store: Store, tenant: str) -> str:
    """One that has failed three times, so that the check tells of it as well."""
    made = add_schedule(
        store, Clock(), f"s{new_id('x')}", tenant=tenant, task_path=f"/{tenant}/rank.toml"
    )
    for _ in range(FAILING_AFTER):
        run = store.schedule_runs.run_now(tenant, made.id, "test", store.schedule_runs.clock())
        claimed = store.schedule_work.claim("runner", run.begin_at)
        assert claimed is not None
        store.schedule_work.finish(claimed, RunEnd(RunState.FAILED, "oh"), run.begin_at)
    return made.id


# Name in a path -> makes one that belongs to a tenant, and one that nobody has.
IDS: dict[str, tuple[Callable[[Store, str], str], str]] = {
    "job_id": (make_job, "job_0199aabbccddeeff00112233"),
    "file_id": (make_file, "file-0199aabbccddeeff00112233"),
    "batch_id": (make_batch, "batch_0199aabbccddeeff00112233"),
    "schedule": (make_schedule, "sch_0199aabbccddeeff00112233"),
    "webhook_id": (make_webhook, "wh_0199aabbccddeeff00112233"),
    "delivery_id": (make_delivery, "whd_0199aabbccddeeff00112233"),
}
# Name in a path -> what is the same for every tenant: whose a model is, is no question.
SHARED = {"model": "demo"}


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
        if (verb, path) not in CALLS or not set(names_in(path)) <= IDS.keys() | SHARED.keys()
    }


def names_in(path: str) -> list[str]:
    return re.findall(r"{(\w+)[^}]*}", path)


def url_of(path: str) -> str:
    """With ids that nobody has."""
    ids = {name: nobodys for name, (_, nobodys) in IDS.items()} | SHARED
    return re.sub(r"{(\w+)[^}]*}", lambda name: ids[name[1]], path)


@pytest.fixture
def store(sqlite_url: str, migrated_sqlite_file: Path) -> Iterator[Store]:
    shutil.copy(migrated_sqlite_file, sqlite_url.removeprefix("sqlite:///"))
    opened = Store(sqlite_url)
    opened.models.plan_for([PlannedModel("demo", "f" * 64, 512)])
    for name in ("owls", "bats"):
        opened.accounts.create_tenant(Tenant(name))
    yield opened
    opened.close()


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
    return client.request(
        verb, url_of(path), content=call.body, params=call.query, headers={**call.headers, **key}
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
        for verb in VERBS:
            refused = client.request(verb, url_of(path))
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
            # Without the smallest scope of the verb, that one is named: the route is not known.
            asks = scope is Scope.READ and verb not in ("GET", "HEAD")
            verbs = Scope.SUBMIT if asks else call.scope
            named = min(call.scope, verbs, key=order.index)
            assert repr(named.value) in refused.json()["error"]["message"]
    # A verb that changes something needs more than to read, whatever the route says.
    assert client.delete("/v1/new", headers=key_of(store, "owls", Scope.READ)).status_code == 403


def lists_of(client: TestClient, key: dict[str, str]) -> list[str]:
    """All that the lists show to a key."""
    lists = [path for (verb, path), call in CALLS.items() if (verb, call.scope) == ("GET", READ)]
    paths = [path for path in lists if not names_in(path)]
    answers = [client.get(path, headers=key) for path in paths]
    assert {answer.status_code for answer in answers} == {200}
    return [answer.text for answer in answers]


@pytest.mark.parametrize("name", IDS)
def test_what_is_anothers_does_not_exist(client: TestClient, store: Store, name: str) -> None:
    """The words are those for an id that nobody has. One's own is there."""
    key, foreign_key = (key_of(store, tenant, Scope.ADMIN) for tenant in ("owls", "bats"))
    make, nobodys = IDS[name]
    foreign = make(store, "bats")
    before = lists_of(client, foreign_key)
    reached = [(verb, path) for verb, path in CALLS if name in names_in(path)]
    assert reached
    for verb, path in reached:
        call, mine = CALLS[verb, path], make(store, "owls")
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
        assert answers[2].status_code in (200, 201, 202, 409), (verb, path)
    assert lists_of(client, foreign_key) == before  # nothing was done to them


def test_anothers_file_and_the_job_of_anothers_batch_do_not_exist(
    client: TestClient, store: Store
) -> None:
    key = key_of(store, "owls", Scope.SUBMIT)
    answers = [
        client.post(
            "/v1/batches", json={"input_file_id": one, "endpoint": "/v1/completions"}, headers=key
        )
        for one in (make_file(store, "bats"), make_file(store, "owls"))
    ]
    assert [one.status_code for one in answers] == [404, 200]
    job_id = job_id_of(make_batch(store, "bats"))
    for verb, path in CALLS:
        if "job_id" in names_in(path):
            url = path.format(job_id=job_id)
            assert client.request(verb, url, headers=key).status_code == 404, (verb, path)


def test_lists_hold_ones_own_alone(client: TestClient, store: Store) -> None:
    key = key_of(store, "owls", Scope.READ)
    listed = {name: make for name, (make, _) in IDS.items() if name != "delivery_id"}
    made = [(make(store, "owls"), make(store, "bats")) for make in listed.values()]
    shown = "".join(lists_of(client, key))
    for mine, foreign in made:
        assert mine in shown
        assert foreign not in shown
        for path in ("/v1/jobs", "/v1/files", "/v1/batches", "/v1/webhooks", "/v1/schedules"):
            page = client.get(path, params={"after": foreign, "limit": 50}, headers=key)
            assert page.status_code in (200, 400)
            assert page.status_code == 400 or foreign not in page.text


def test_models_are_the_same_for_every_tenant(client: TestClient, store: Store) -> None:
    keys = [key_of(store, tenant, Scope.READ) for tenant in ("owls", "bats")]
    for path in ("/v1/models", "/v1/models/demo"):
        first, second = (client.get(path, headers=key) for key in keys)
        assert first.status_code == 200
        assert '"demo"' in first.text
        assert first.text == second.text


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


@dataclass(frozen=True)
class Told:
    """What the API knows of the other processes."""

    reasons: dict[str, str]

    def parts(self) -> dict[str, str]:
        return self.reasons


OWN = "the-operators-own-secret-of-40-letters!!"


def test_what_is_open_says_nothing_of_jobs(client: TestClient, store: Store) -> None:
    tenant = "tenant-7f3a"  # no word that an example of the document may hold
    store.accounts.create_tenant(Tenant(tenant))
    key_of(store, tenant, Scope.READ)
    job_id = make_job(store, tenant)
    for path in sorted(path for verb, path in OPEN if verb == "GET"):
        answer = client.get(path)
        assert answer.status_code == 200, path
        for word in (job_id, tenant, "row of", "a secret"):
            assert word not in answer.text
    assert set(client.get("/health").json()) == {"status", "version", "parts"}


def test_health_shows_names_and_reasons_to_keys_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.models.plan_for([PlannedModel("secret-model", "a" * 64, 64)])
    reasons = {"broker": "ok", "planner": "unknown", "gpu_workers": "start `nightjar worker`"}
    app = create_app(
        store,
        lambda _: None,
        deployment=Told(reasons),
        access=Access(OWN, required=True),
    )
    states = {"database": "ok", "uploads": "ok", **reasons, "gpu_workers": "unavailable"}
    key = key_of(store, "default", Scope.READ)["Authorization"].removeprefix("Bearer ")
    told: dict[str | None, bool] = {
        None: False,
        "": False,
        "nj_abcd1234_" + "x" * 43: False,
        key: True,
        OWN: True,
    }
    with TestClient(app) as client:
        for sent, is_told in told.items():
            headers = {} if sent is None else {"Authorization": f"Bearer {sent}"}
            health = client.get("/health", headers=headers)
            body = health.json()
            assert health.status_code == 200
            assert ("secret-model" in health.text) == is_told
            assert body["parts"] == states | (reasons if is_told else {})
        twice = [("Authorization", f"Bearer {one}") for one in (key, OWN)]
        assert "models" not in client.get("/health", headers=twice).json()

        def away() -> None:
            raise StoreUnavailableError("at db.example.org")

        monkeypatch.setattr(store, "ping", away)
        for sent, is_told in ((None, False), (key, False), (OWN, True)):
            headers = {} if sent is None else {"Authorization": f"Bearer {sent}"}
            health = client.get("/health", headers=headers)
            assert health.status_code == 503
            assert ("the API's log says why" in health.text) == is_told
            assert health.json()["parts"]["database"] == "unavailable" or is_told

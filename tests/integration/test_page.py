"""The web page's routes without a browser: who gets in, what may be done, what is shown."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from nightjar.jobs.accounts import NewKey, Scope, Tenant
from nightjar.jobs.records import NewJob, NewRequest, NewResult
from nightjar.jobs.schedule_records import RunState, Trigger
from nightjar.jobs.states import JobState, RequestKind
from nightjar.jobs.store import Store
from tests.api_app import real_app
from tests.jobs import planned
from tests.outcomes import claim
from tests.schedules import Clock, add_schedule, runs_of
from tests.shown_deployment import fill

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m"


@pytest.fixture
def store(sqlite_url: str, migrated_sqlite_file: Path) -> Iterator[Store]:
    shutil.copy(migrated_sqlite_file, sqlite_url.removeprefix("sqlite:///"))
    opened = Store(sqlite_url)
    for name in ("owls", "bats"):
        opened.accounts.create_tenant(Tenant(name))
    yield opened
    opened.close()


@pytest.fixture
def browser(store: Store) -> Iterator[TestClient]:
    with TestClient(real_app(store), base_url="http://127.0.0.1", follow_redirects=False) as opened:
        yield opened


def job_of(store: Store, tenant: str, custom_id: str = "row-1") -> str:
    body = {"prompt": HOSTILE, "max_tokens": 4}
    with store.jobs.submit(NewJob("demo", tenant=tenant)) as submission:
        submission.add([NewRequest(0, 1, custom_id, RequestKind.GENERATE, body)])
    return submission.job_id


def signed_in(browser: TestClient, store: Store, tenant: str, scope: Scope) -> str:
    """Sign in with a new key; returns the key's prefix."""
    key, stored = store.accounts.create_key(NewKey(tenant, scope))
    answer = browser.post("/ui/sign-in", data={"key": key})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/ui/"
    return stored.prefix


def token_on(browser: TestClient, path: str) -> str:
    found = re.search(r'name="token" value="([^"]+)"', browser.get(path).text)
    assert found, path
    return found[1]


def test_a_session_is_needed_where_keys_are(browser: TestClient, store: Store) -> None:
    job_id = job_of(store, "owls")
    store.accounts.create_key(NewKey("owls", Scope.READ))
    for path in ("/ui/", f"/ui/jobs/{job_id}", "/ui/workers", "/ui/queues", "/ui/tenants"):
        answer = browser.get(path)
        assert answer.status_code == 303, path
        assert answer.headers["location"].startswith("/ui/sign-in?next="), path
    assert browser.post(f"/ui/jobs/{job_id}/cancel").status_code == 303
    assert store.jobs.get(job_id).state is JobState.QUEUED
    refused = browser.post("/ui/sign-in", data={"key": "nj_wrong"})
    assert refused.status_code == 401
    assert browser.get("/ui/").status_code == 303  # the cookie of its forms opens nothing


def test_the_cookie_is_out_of_reach_and_ends_with_its_key(
    browser: TestClient, store: Store
) -> None:
    key, stored = store.accounts.create_key(NewKey("owls", Scope.READ))
    answer = browser.post("/ui/sign-in", data={"key": key, "place": "https://evil.example/"})
    assert answer.headers["location"] == "/ui/"
    cookie = answer.headers["set-cookie"].lower()
    assert all(word in cookie for word in ("httponly", "samesite=strict", "path=/ui"))
    assert key not in answer.headers["set-cookie"]
    assert browser.get("/ui/").status_code == 200
    store.accounts.revoke_key(stored.prefix)
    with TestClient(real_app(store), base_url="http://127.0.0.1", follow_redirects=False) as later:
        later.cookies = browser.cookies
        assert later.get("/ui/").status_code in (303, 401)


def test_another_tenants_job_is_not_there(browser: TestClient, store: Store) -> None:
    theirs = job_of(store, "bats")
    signed_in(browser, store, "owls", Scope.SUBMIT)
    for rest in ("", "/figures", "/results", "/failures", "/events", "/confirm/cancel"):
        assert browser.get(f"/ui/jobs/{theirs}{rest}").status_code == 404, rest
    token = token_on(browser, "/ui/")
    answer = browser.post(f"/ui/jobs/{theirs}/cancel", data={"token": token})
    assert answer.status_code == 404
    assert theirs not in browser.get("/ui/").text


def test_an_act_needs_its_scope_and_the_token_of_its_page(
    browser: TestClient, store: Store
) -> None:
    mine = job_of(store, "owls")
    signed_in(browser, store, "owls", Scope.READ)
    assert browser.get(f"/ui/jobs/{mine}/confirm/pause").status_code == 403
    signed_in(browser, store, "owls", Scope.SUBMIT)
    for token in ("", "a.b", "x" * 50):
        assert browser.post(f"/ui/jobs/{mine}/pause", data={"token": token}).status_code == 403
    assert store.jobs.get(mine).state is JobState.QUEUED
    token = token_on(browser, f"/ui/jobs/{mine}/confirm/pause")
    foreign = {"origin": "https://evil.example"}
    refused = browser.post(f"/ui/jobs/{mine}/pause", data={"token": token}, headers=foreign)
    assert refused.status_code == 403
    assert store.jobs.get(mine).state is JobState.QUEUED
    for action, state in (
        ("pause", JobState.PAUSED),
        ("resume", JobState.QUEUED),
        ("cancel", JobState.CANCELLED),
    ):
        token = token_on(browser, f"/ui/jobs/{mine}/confirm/{action}")
        done = browser.post(f"/ui/jobs/{mine}/{action}", data={"token": token})
        assert done.status_code == 303, action
        assert store.jobs.get(mine).state is state
    assert browser.post(f"/ui/jobs/{mine}/explode", data={"token": token}).status_code == 404


def test_a_schedule_is_run_paused_and_resumed_by_its_tenant_alone(
    browser: TestClient, store: Store
) -> None:
    mine, theirs = (
        add_schedule(store, Clock(), tenant=tenant, task_name="rank") for tenant in ("owls", "bats")
    )
    signed_in(browser, store, "owls", Scope.READ)
    assert browser.get(f"/ui/schedules/{mine.id}/confirm/run").status_code == 403
    signed_in(browser, store, "owls", Scope.SUBMIT)
    listed = browser.get("/ui/schedules").text
    assert mine.id in listed
    assert theirs.id not in listed
    for rest in ("", "/events", "/confirm/run"):
        assert browser.get(f"/ui/schedules/{theirs.id}{rest}").status_code == 404
    place = f"/ui/schedules/{mine.id}"
    assert browser.post(f"{place}/run", data={"token": "a.b"}).status_code == 403
    assert runs_of(store, mine) == []
    for action in ("run", "pause", "resume"):
        token = token_on(browser, f"{place}/confirm/{action}")
        theirs_too = browser.post(f"/ui/schedules/{theirs.id}/{action}", data={"token": token})
        assert theirs_too.status_code == 404
        assert browser.post(f"{place}/{action}", data={"token": token}).status_code == 303
        assert store.schedules.get("owls", mine.id).paused is (action == "pause")
    (run,) = runs_of(store, mine)
    assert (run.trigger, run.state) == (Trigger.MANUAL, RunState.WAITING)
    assert runs_of(store, theirs) == []
    done = [one.actor for one in store.schedules.changes("owls", 9)]
    assert len([actor for actor in done if actor.startswith("key nj_")]) == 3
    assert browser.get(f"{place}/confirm/resume").status_code == 409
    assert browser.get(f"{place}/confirm/explode").status_code == 404


def test_every_page_loads_from_here_alone(browser: TestClient, store: Store) -> None:
    fill(store)
    paths = ["/ui/", "/ui/workers", "/ui/queues", "/ui/tenants", "/ui/schedules"]
    jobs = re.findall(r"/ui/jobs/([0-9A-Za-z_-]{8,})", browser.get("/ui/").text)
    assert jobs, browser.get("/ui/").text
    paths += [f"/ui/jobs/{jobs[0]}{rest}" for rest in ("", "/results", "/failures")]
    for path in paths:
        answer = browser.get(path)
        assert answer.status_code == 200, (path, answer.text[:300])
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy or "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert not re.search(r'(?:src|href)="(?:https?:)?//', answer.text), path
        assert not re.search(r"<script(?![^>]*\bsrc=)", answer.text), path
        assert " style=" not in answer.text, path
    for name in re.findall(r'(?:src|href)="(/ui/static/[^"]+)"', browser.get("/ui/").text):
        served = browser.get(name)
        assert served.status_code == 200, name
        assert "max-age" in served.headers["cache-control"]
    assert browser.get("/ui/static/x/../../../../pyproject.toml").status_code == 404


def test_texts_of_strangers_are_harmless(browser: TestClient, store: Store) -> None:
    job_id, (ref, *_) = planned(store, 1)
    claimed = claim(store, ref)
    failure = NewResult.failure(claimed.requests[0].id, "odd", HOSTILE, status=500)
    store.leases.finish(ref.id, 0, "worker", [failure])
    for rest in ("", "/results", "/failures"):
        text = browser.get(f"/ui/jobs/{job_id}{rest}").text
        assert "<script>alert" not in text
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "alert(1)" in browser.get(f"/ui/jobs/{job_id}/failures").text


def test_wrong_addresses_are_told(browser: TestClient, store: Store) -> None:
    job_of(store, "default")
    for path, status in (
        ("/ui/jobs/nope", 404),
        ("/ui/jobs/%00", 404),
        ("/ui/nothing", 404),
        ("/ui/?after=" + "9" * 400, None),
    ):
        answer = browser.get(path)
        assert answer.status_code == status or (status is None and answer.status_code < 500), path
        assert answer.headers["content-type"].startswith("text/html"), path


def test_the_root_sends_browsers_to_the_page_and_the_document_has_no_pages(
    browser: TestClient,
) -> None:
    sent = browser.get("/", headers={"accept": "text/html"})
    assert (sent.status_code, sent.headers["location"]) == (303, "/ui/")
    assert browser.get("/", headers={"accept": "application/json"}).status_code == 404
    assert not [path for path in browser.get("/openapi.json").json()["paths"] if "ui" in path]

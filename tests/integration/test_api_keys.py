"""Keys over HTTP: what is refused and how it is told, requests a minute, quotas."""

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from nightjar.jobs.accounts import ApiKey, NewKey, Tenant, generate_key
from nightjar.jobs.api import create_app
from nightjar.jobs.api.key_ring import Access
from nightjar.jobs.states import Scope
from nightjar.jobs.store import Store
from nightjar.jobs.store.account_tables import api_key
from nightjar.jobs.store.accounts import Accounts


@pytest.fixture
def store(sqlite_url: str, migrated_sqlite_file: Path) -> Iterator[Store]:
    shutil.copy(migrated_sqlite_file, sqlite_url.removeprefix("sqlite:///"))
    opened = Store(sqlite_url)
    opened.accounts.create_tenant(Tenant("owls"))
    yield opened
    opened.close()


def make(accounts: Accounts) -> tuple[str, ApiKey]:
    return accounts.create_key(NewKey("owls", Scope.SUBMIT))


@pytest.fixture
def client(store: Store) -> Iterator[TestClient]:
    with TestClient(create_app(store, lambda _: None, served_model="demo")) as opened:
        yield opened


def test_every_bad_key_is_refused_in_the_same_words(client: TestClient, store: Store) -> None:
    good, _ = make(store.accounts)
    revoked, one = make(store.accounts)
    store.accounts.revoke_key(one.prefix)
    expired, other = make(store.accounts)
    ended = sa.update(api_key).where(api_key.c.prefix == other.prefix)
    past = ended.values(expires_at=datetime.now(UTC) - timedelta(seconds=1))
    store.database.write(lambda connection: connection.execute(past))
    unknown, wrong_secret = generate_key(), good[:-1] + ("a" if good[-1] != "a" else "b")
    bad = [revoked, expired, unknown, wrong_secret, "sk-other", "x" * 5_000, "nj_", "é"]
    answers = [
        client.get("/v1/jobs", headers={"Authorization": f"Bearer {key}".encode()}) for key in bad
    ]
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].json()["error"]["code"] == "invalid_api_key"
    told = {answer.headers["www-authenticate"] for answer in answers}
    assert told == {'Bearer realm="nightjar", error="invalid_token"'}
    for key in bad[:5]:
        assert key not in answers[0].text
    assert client.get("/v1/jobs", headers={"Authorization": f"bearer  {good} "}).status_code == 200


@pytest.mark.parametrize("header", ["Basic b3dsOmhvb3Q=", "Bearer", "Bearer ", "", "nj_x"])
def test_a_header_without_a_key(client: TestClient, store: Store, header: str) -> None:
    make(store.accounts)
    assert client.get("/v1/jobs", headers={"Authorization": header}).status_code == 401


def test_a_key_in_another_header_is_no_key(client: TestClient, store: Store) -> None:
    key, _ = make(store.accounts)
    for name in ("x-api-key", "api-key", "cookie"):
        refused = client.get("/v1/jobs", headers={name: key})
        assert refused.status_code == 401
        assert "Authorization: Bearer KEY" in refused.json()["error"]["message"]


def test_two_different_keys_are_refused(client: TestClient, store: Store) -> None:
    one, two = (f"Bearer {make(store.accounts)[0]}" for _ in range(2))
    several = client.get("/v1/jobs", headers=[("authorization", one), ("authorization", two)])
    assert (several.status_code, several.json()["error"]["code"]) == (400, "several_api_keys")
    same = client.get("/v1/jobs", headers=[("authorization", one), ("authorization", one)])
    assert same.status_code == 200


@pytest.mark.parametrize(
    "query",
    [
        "api_key=SECRET",
        "limit=1&API-Key=SECRET",
        "access_token=",
        "token=sk-1",
        "authorization=Bearer%20SECRET",
        "metadata=KEY",
        "KEY",
        "a=KEY&b=1",
        "a=%6Ej_ENCODED",
    ],
)
@pytest.mark.parametrize("path", ["/v1/jobs", "/health"])
def test_a_key_in_the_query_is_refused(
    client: TestClient, store: Store, path: str, query: str
) -> None:
    key, _ = make(store.accounts)
    sent = query.replace("KEY", key).replace("ENCODED", key[3:])
    refused = client.get(f"{path}?{sent}", headers={"Authorization": f"Bearer {key}"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "api_key_in_query")
    assert "revoke the key" in refused.json()["error"]["message"]
    assert key not in refused.text


@pytest.mark.parametrize("path", ["/v1/files/KEY", "/v1/models/a%2FKEY", "/KEY/v1/jobs"])
def test_a_key_in_the_path_is_refused_and_not_repeated(
    client: TestClient, store: Store, path: str
) -> None:
    key, _ = make(store.accounts)
    address = path.replace("KEY", key)
    refused = client.get(address, headers={"Authorization": f"Bearer {key}"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "api_key_in_query")
    assert key not in refused.text


def test_other_queries_go_on(client: TestClient) -> None:
    query = {"limit": 1, "after": "job_1", "keys": "a", "metadata": "nj_abcd1234"}
    assert client.get("/v1/jobs", params=query).status_code == 200


def test_requests_a_minute_are_bounded_and_told(client: TestClient, store: Store) -> None:
    store.accounts.change_tenant("owls", requests_a_minute=3)
    key = {"Authorization": f"Bearer {make(store.accounts)[0]}"}
    answers = [client.get("/v1/jobs", headers=key) for _ in range(4)]
    assert [one.status_code for one in answers] == [200, 200, 200, 429]
    left = [one.headers["x-ratelimit-remaining-requests"] for one in answers]
    assert (left, answers[0].headers["x-ratelimit-limit-requests"]) == (["2", "1", "0", "0"], "3")
    error = answers[3].json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert "may send 3 requests a minute; try again in " in error["message"]
    assert 15 <= int(answers[3].headers["retry-after"]) <= 20
    assert client.get("/health").status_code == 200
    free = client.get("/v1/jobs", headers={"Authorization": f"Bearer {other_key(store)}"})
    assert free.status_code == 200
    assert "x-ratelimit-limit-requests" not in free.headers


def other_key(store: Store) -> str:
    return store.accounts.create_key(NewKey("default", Scope.READ))[0]


def test_a_process_that_is_handed_counted_requests_counts_none(store: Store) -> None:
    store.accounts.change_tenant("default", requests_a_minute=1)
    app = create_app(store, lambda _: None, access=Access(counts=False))
    with TestClient(app) as client:
        assert [client.get("/v1/jobs").status_code for _ in range(3)] == [200] * 3


def test_quotas_are_told_with_when_to_come_again(client: TestClient, store: Store) -> None:
    key = {"Authorization": f"Bearer {make(store.accounts)[0]}"}
    row = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}}'

    def refused() -> tuple[int, str, str | None, str]:
        answer = client.post("/v1/jobs", content=row, headers=key)
        told = answer.headers
        code = answer.json()["error"]["code"]
        return answer.status_code, code, told.get("retry-after"), told["x-should-retry"]

    store.accounts.change_tenant("owls", rows_waiting=1)
    assert client.post("/v1/jobs", content=row, headers=key).status_code == 201
    assert refused() == (429, "rows_waiting_exceeded", "60", "true")
    store.accounts.change_tenant("owls", rows_waiting=0)
    assert refused() == (429, "rows_waiting_exceeded", None, "false")
    store.accounts.change_tenant("owls", tokens_a_day=0)
    status, code, retry_after, should = refused()
    assert (status, code, should) == (429, "insufficient_quota", "false")
    assert retry_after is not None
    assert 0 < int(retry_after) <= 86_400
    assert len(store.jobs.newest(9)) == 1

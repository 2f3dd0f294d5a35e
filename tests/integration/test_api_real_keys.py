"""`nightjar api` as a process, with keys: its upload process, the openai client, its logs."""

import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from nightjar.jobs.accounts import NewKey, Tenant, TenantLimits, generate_key
from nightjar.jobs.api.key_ring import KEPT_S
from nightjar.jobs.states import Scope
from nightjar.jobs.store import Store
from nightjar.pipeline.client.blocking import Client
from nightjar.pipeline.client.errors import ClientError
from tests.api_process import Api, running_api
from tests.processes import wait_until

OWN = "the-operators-own-secret-of-40-letters!!"
PROMPT = "a planted prompt that nobody may log"
ROW = (
    '{"custom_id": "a", "method": "POST", "url": "/v1/completions", '
    f'"body": {{"prompt": "{PROMPT}"}}}}\n'
)
JSONL = {"content-type": "application/jsonl"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, migrated_sqlite_file: Path) -> Iterator[Store]:
    path = tmp_path_factory.mktemp("keys") / "nightjar.db"
    shutil.copy(migrated_sqlite_file, path)
    opened = Store(f"sqlite:///{path}")
    for name in ("owls", "bats"):
        opened.accounts.create_tenant(Tenant(name))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "api.log"


@pytest.fixture(scope="module")
def api(store: Store, tiny_model: Path, log: Path) -> Iterator[Api]:
    url = store.database.url.render_as_string(hide_password=False)
    given = {"NIGHTJAR_API_KEY": OWN, "NIGHTJAR_MODEL_NAME": "tiny"}
    with running_api(url.replace("+pysqlite", ""), tiny_model, log.parent, **given) as running:
        yield running


def make(store: Store, tenant: str, scope: Scope = Scope.SUBMIT) -> str:
    return store.accounts.create_key(NewKey(tenant, scope))[0]


def test_an_upload_is_its_senders_through_both_processes(
    api: Api, store: Store, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(ROW, encoding="utf-8")
    made = {}
    for tenant, key in (("owls", make(store, "owls")), ("default", OWN)):
        with Client(api.url, api_key=key) as client:
            made[tenant] = client.submit(source, idempotency_key="night").id
            assert store.jobs.get(made[tenant]).tenant == tenant
    with Client(api.url, api_key=make(store, "bats", Scope.READ)) as client:
        with pytest.raises(ClientError, match="404: there is no job"):
            client.job(made["owls"]).status()
        with pytest.raises(ClientError, match="403: this call needs a key of the scope 'submit'"):
            client.submit(source)
    with Client(api.url) as client, pytest.raises(ClientError, match="401: this API needs a key"):
        client.submit(source)
    store.accounts.change_tenant("bats", rows_waiting=0)
    headers = {"Authorization": f"Bearer {make(store, 'bats')}", **JSONL}
    full = httpx.post(f"{api.url}/v1/jobs", content=ROW, headers=headers)
    assert (full.status_code, full.headers["x-should-retry"]) == (429, "false")


def test_files_are_bounded_by_the_bytes_that_a_tenant_may_store(api: Api, store: Store) -> None:
    store.accounts.create_tenant(Tenant("moths", limits=TenantLimits(bytes_stored=len(ROW) + 9)))
    url, key = f"{api.url}/v1", make(store, "moths")
    file = ("in.jsonl", ROW.encode())
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        first = client.files.create(file=file, purpose="batch")
        with pytest.raises(openai.PermissionDeniedError) as caught:
            client.files.create(file=file, purpose="batch")
        assert caught.value.code == "storage_quota_exceeded"
        client.files.delete(first.id)
        assert client.files.create(file=file, purpose="batch").bytes == len(ROW)


def test_a_revoked_key_stops_while_the_api_runs(api: Api, store: Store) -> None:
    key, made = store.accounts.create_key(NewKey("owls", Scope.READ))
    headers = {"Authorization": f"Bearer {key}"}
    assert httpx.get(f"{api.url}/v1/jobs", headers=headers).status_code == 200
    store.accounts.revoke_key(made.prefix)
    began_at = time.monotonic()
    wait_until(
        "its end", lambda: httpx.get(f"{api.url}/v1/jobs", headers=headers).status_code == 401, 30
    )
    assert time.monotonic() - began_at < KEPT_S + 5


def test_the_openai_client_waits_where_it_is_told_to_and_raises_its_own_errors(
    api: Api, store: Store
) -> None:
    store.accounts.change_tenant("owls", requests_a_minute=120)
    key = make(store, "owls", Scope.READ)
    url = f"{api.url}/v1"
    with (
        httpx.Client(headers={"Authorization": f"Bearer {key}"}) as plain,
        openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client,
    ):
        client.get("/jobs", cast_to=object)  # the first call of a client takes long
        for _ in range(200):
            if plain.get(f"{url}/jobs").status_code == 429:
                break
        with pytest.raises(openai.RateLimitError) as limited:
            client.get("/jobs", cast_to=object)
        assert limited.value.code == "rate_limit_exceeded"
        wait_s = int(limited.value.response.headers["retry-after-ms"]) / 1_000
        assert 0 < wait_s <= 0.5
        began_at = time.monotonic()
        answer = client.with_options(max_retries=2).get("/jobs", cast_to=dict[str, object])
        assert answer["object"] == "list"
        assert time.monotonic() - began_at < 5
    store.accounts.change_tenant("owls", requests_a_minute=None)
    with (
        openai.OpenAI(base_url=url, api_key=generate_key(), max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="unknown, expired or revoked"),
    ):
        client.get("/jobs", cast_to=object)
    with (
        openai.OpenAI(base_url=url, api_key=OWN, max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="there is no job 'job_1'"),
    ):
        client.get("/jobs/job_1", cast_to=object)


def test_no_key_and_no_prompt_is_logged(api: Api, store: Store, log: Path) -> None:
    """Good calls and bad ones, through both processes; then every line of both is searched."""
    good, unknown = make(store, "owls"), generate_key()
    spare, record = store.accounts.create_key(NewKey("owls", Scope.SUBMIT))
    store.accounts.revoke_key(record.prefix)
    with httpx.Client(base_url=api.url, timeout=30) as client:
        for key in (good, unknown, spare, OWN):
            headers = {"Authorization": f"Bearer {key}", **JSONL}
            client.get("/v1/jobs", headers=headers)
            client.get("/v1/jobs", params={"api_key": key})
            client.get(f"/v1/jobs/{key}", headers=headers)
            client.get("/v1/jobs", params={"limit": key, "after": PROMPT}, headers=headers)
            client.get(f"/{key}", headers={"x-api-key": key, "cookie": key})
            client.get("/health", headers={"host": f"{key}.example.org"})
            client.request("TRACE", f"/v1/jobs?{key}", headers=headers)
            for body in (
                ROW,
                f'{{"custom_id": "{PROMPT}", {PROMPT}',
                ROW.replace("/v1/completions", PROMPT),
                f"PAR1{PROMPT}",
                "",
            ):
                client.post("/v1/jobs", content=body, headers=headers)
            client.post("/v1/jobs", params={"metadata": PROMPT}, content=ROW, headers=headers)
            client.post("/v1/jobs", content=ROW, headers={**headers, "idempotency-key": PROMPT})
            client.post("/v1/jobs", content=ROW * 2, headers={**headers, "idempotency-key": PROMPT})
            client.post("/v1/jobs", content=ROW, headers={**headers, "content-type": PROMPT})
        break_http(api.url, good)
        assert client.get("/health").status_code == 200
    text = log.read_text(encoding="utf-8")
    assert "job submitted" in text
    assert "planner not woken" in text
    secrets = [good, unknown, spare, OWN]
    for planted in (*secrets, *(key[12:] for key in secrets), PROMPT, PROMPT.replace(" ", "%20")):
        assert planted not in text


def break_http(url: str, key: str) -> None:
    """What is no HTTP, and a body that breaks off."""
    address = urlsplit(url)
    assert address.hostname is not None
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    for sent in (
        f"{key} {PROMPT}\r\n\r\n",
        f"{head}Content-Length: 9999\r\n\r\n{ROW}",
        f"{head}Transfer-Encoding: chunked\r\n\r\n{PROMPT}\r\n",
    ):
        with socket.create_connection((address.hostname, address.port or 80), 5) as raw:
            raw.sendall(sent.encode())

"""Models over HTTP: the openai client lists them; a job is refused if nobody knows its model."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from nightjar.jobs.api import create_app
from nightjar.jobs.api.model_names import ConfiguredModels
from nightjar.jobs.models import PlannedModel
from nightjar.jobs.store import Store
from nightjar.jobs.store.waiting import SWEEPER
from nightjar.jobs.workers import ComputeSeconds
from nightjar.pipeline.client.blocking import Client
from nightjar.pipeline.client.errors import ClientError
from nightjar.pipeline.front.cli import app
from tests.api_process import listening

ALPHA, BETA = "a" * 64, "b" * 64
HEADERS = {"content-type": "application/jsonl"}


@pytest.fixture
def store(store: Store) -> Store:
    """A planner plans for two models, and a GPU worker serves one of them."""
    store.models.plan_for([PlannedModel("org/alpha", ALPHA, 128), PlannedModel("beta", BETA, 64)])
    for owner in (SWEEPER, "gpu"):
        store.heartbeats.beat(owner, ComputeSeconds())
    store.models.serve("gpu", [ALPHA])
    return store


def application(store: Store, *names: str, accepts_any: bool = False) -> FastAPI:
    return create_app(store, lambda _: None, served_model=ConfiguredModels(names, accepts_any))


@pytest.fixture
def client(store: Store) -> Iterator[TestClient]:
    with TestClient(application(store)) as opened:
        yield opened


def rows(*models: str | None) -> bytes:
    """A line for each name; None names no model."""
    bodies = [
        {"prompt": "a", "max_tokens": 4} | ({"model": name} if name else {}) for name in models
    ]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body}
        for n, body in enumerate(bodies)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def submit(client: TestClient, content: bytes, **query: str) -> tuple[int, dict[str, Any]]:
    answer = client.post("/v1/jobs", params=query, content=content, headers=HEADERS)
    body: dict[str, Any] = answer.json()
    return answer.status_code, body.get("error", body)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_openai_client_lists_and_retrieves_models(store: Store) -> None:
    with (
        listening(application(store)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        found = list(client.models.list())
        assert [model.id for model in found] == ["org/alpha", "beta"]  # who is served comes first
        assert {model.object for model in found} == {"model"}
        one = client.models.retrieve("org/alpha")
        assert one == found[0]
        assert (one.owned_by, one.created > 1_700_000_000) == ("nightjar", True)
        assert (one.model_extra or {})["context_length"] == 128
        assert [(one.model_extra or {})["served"] for one in found] == [True, False]
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("org/gamma")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert "served: 'org/alpha'; known, but not served now: 'beta'" in str(caught.value)
        with Client(url) as ours:
            assert [model.workers for model in ours.models()] == [1, 0]
        health = client.get("http://" + url.removeprefix("http://") + "/health", cast_to=object)
        assert health["models"]["org/alpha"] == "ok"  # type: ignore[index]
        assert "no GPU worker serves it" in health["models"]["beta"]  # type: ignore[index]


def test_a_model_that_nobody_knows_is_refused_and_the_known_ones_are_named(
    client: TestClient, store: Store
) -> None:
    status, error = submit(client, rows(None), model="gamma")
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    for said in ("'gamma'", "served: 'org/alpha'", "not served now: 'beta'", "wait_for_model=true"):
        assert said in error["message"]
    status, error = submit(client, rows("gamma", "delta"))
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "body.model")
    status, error = submit(client, rows(None, "gamma"))
    assert (status, error["code"]) == (404, "model_not_found")
    status, error = submit(client, rows(None))
    assert (status, error["code"]) == (400, "missing_model")
    assert "'org/alpha'" in error["message"]
    status, error = submit(client, rows(None), model="")
    assert (status, error["code"]) == (400, "missing_model")
    assert store.jobs.newest() == []


def test_known_is_enough_though_nobody_serves_it_yet(client: TestClient) -> None:
    status, job = submit(client, rows(None), model="beta")
    assert (status, job["model"]) == (201, "beta")
    shown = client.get(f"/v1/jobs/{job['id']}").json()
    assert shown["waits_for"] == ["model"]
    assert "no GPU worker serves 'beta'" in shown["waiting"]


def test_the_first_row_with_a_known_model_names_the_jobs(client: TestClient, store: Store) -> None:
    status, job = submit(client, rows(None, "gamma", "beta", "org/alpha"))
    assert (status, job["model"], job["accepted"]) == (201, "beta", 4)
    assert store.backlog.next_to_plan((), "org/alpha", is_only=True) is None  # it was named
    found = store.backlog.next_to_plan((), "beta")
    assert (found.id if found else None) == job["id"]
    status, job = submit(client, rows("beta"), model="org/alpha")
    assert (status, job["model"]) == (201, "org/alpha")


def test_a_job_waits_for_its_model_if_it_is_asked_to(client: TestClient, store: Store) -> None:
    for content, query in ((rows(None), {"model": "gamma"}), (rows("gamma", "beta"), {})):
        status, job = submit(client, content, wait_for_model="true", **query)
        assert (status, job["model"]) == (201, "gamma")
        shown = client.get(f"/v1/jobs/{job['id']}").json()
        assert shown["waits_for"] == ["model"]
        assert "no planner plans for the model 'gamma'" in shown["waiting"]
    assert store.backlog.next_to_plan((), "beta", is_only=True) is None
    status, error = submit(client, rows(None), model="beta", wait_for_model="yes")
    assert (status, error["code"], error["param"]) == (
        400,
        "invalid_wait_for_model",
        "wait_for_model",
    )


def test_what_the_settings_of_the_api_name_is_known_before_a_planner_is_up(store: Store) -> None:
    store.models.plan_for([PlannedModel("beta", BETA, 64)])
    with TestClient(application(store, "demo")) as client:
        status, job = submit(client, rows(None))
        assert (status, job["model"]) == (201, "demo")
        assert store.backlog.next_to_plan((), "new", is_only=True) is not None  # it named none
        assert submit(client, rows(None), model="beta")[0] == 201
        assert submit(client, rows(None, "gamma"))[0] == 201  # the first row can be computed
        assert submit(client, rows("gamma"))[0] == 404
    with TestClient(application(store, "demo", accepts_any=True)) as client:
        for content, query in ((rows("gamma"), {}), (rows(None), {"model": "gamma"})):
            status, job = submit(client, content, **query)
            assert (status, job["model"]) == (201, "demo")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_any_name_is_taken_while_no_model_is_known(store: Store) -> None:
    with store.database.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM model")
    with listening(application(store)) as url, Client(url) as client:
        assert client.models() == []
    with TestClient(application(store)) as test_client:
        assert submit(test_client, rows("new"))[1]["model"] == "new"
        assert submit(test_client, rows(None), model="new")[0] == 201
        assert submit(test_client, rows(None))[1]["code"] == "missing_model"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_key_is_known_again_whatever_model_its_rows_name(
    store: Store, client: TestClient
) -> None:
    headers = {**HEADERS, "Idempotency-Key": "night"}
    first, again = (
        client.post("/v1/jobs", content=rows("beta"), headers=headers) for _ in range(2)
    )
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    store.models.plan_for([PlannedModel("org/alpha", ALPHA, 128)])
    assert client.post("/v1/jobs", content=rows("beta"), headers=headers).status_code == 200
    other = client.post("/v1/jobs", content=rows("org/alpha"), headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_client_submits_for_a_model(store: Store, tmp_path: Any) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(rows(None))
    with listening(application(store)) as url, Client(url) as client:
        assert client.submit(source, model="beta").status().model == "beta"
        with pytest.raises(ClientError, match=r"404: there is no model 'gamma'"):
            client.submit(source, model="gamma")
        assert client.submit(source, model="gamma", wait_for_model=True).status().model == "gamma"
        command = ["submit", str(source), "--api", url, "--model=delta", "--wait-for-model"]
        assert json.loads(CliRunner().invoke(app, command).stdout)["model"] == "delta"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_command_lists_models_for_people_and_for_programs(store: Store) -> None:
    with listening(application(store)) as url:
        told = CliRunner().invoke(app, ["models", "--api", url]).stdout
        assert told.splitlines() == [
            "org/alpha\tserved by 1 GPU worker\tcontext 128",
            "beta\tnot served now\tcontext 64",
        ]
        lines = CliRunner().invoke(app, ["models", "--api", url, "--json"]).stdout.splitlines()
        listed = [json.loads(line) for line in lines]
        assert [(one["id"], one["served"]) for one in listed] == [
            ("org/alpha", True),
            ("beta", False),
        ]
        with store.database.engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM model")
        empty = CliRunner().invoke(app, ["models", "--api", url])
        assert (empty.stdout, empty.exit_code) == ("", 0)
        assert "nightjar worker plan" in empty.stderr

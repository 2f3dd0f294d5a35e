"""The OpenAPI document: whole, with examples that fit, and true of real answers."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest
import schemathesis
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from fastapi.testclient import TestClient

from nightjar.jobs.api import create_app
from nightjar.jobs.api.calls import CallPath, CallSettings
from nightjar.jobs.api.request_bodies import BODIES
from nightjar.jobs.models import PlannedModel
from nightjar.jobs.records import NewResult
from nightjar.jobs.store import Store
from nightjar.jobs.webhooks.addresses import AddressGuard
from tests.call_worker import Worker
from tests.client_types import ClientTypes
from tests.jobs import planned, submit
from tests.outcomes import answers, claim, compute
from tests.processes import nightjar

Document = dict[str, Any]
# Operations that no call of `tour` reaches; each needs a reason.
NOT_TOURED: frozenset[str] = frozenset()
_ENDPOINT = {"endpoint": "/v1/completions"}


@pytest.fixture
def store(sqlite_tables: str) -> Iterator[Store]:
    opened = Store(sqlite_tables)
    yield opened
    opened.close()


@pytest.fixture
def app(store: Store) -> Iterator[FastAPI]:
    guard = AddressGuard(resolver=lambda host, port: ["93.184.216.34"])
    worker = Worker(store)
    calls = CallSettings(path=CallPath(worker.plan, worker.send))
    yield create_app(store, lambda job_id: None, served_model="tiny", guard=guard, calls=calls)
    worker.threads.shutdown()


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app) as opened:
        yield opened


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """As it is served; a database without tables is enough for it."""
    store = Store(f"sqlite:///{tmp_path_factory.mktemp('document')}/empty.db")
    app = create_app(store, lambda job_id: None)
    found: Document = TestClient(app).get("/openapi.json").json()
    store.close()
    return found


def operations(document: Document) -> Iterator[tuple[str, str, Document]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield path, method, operation


def test_every_route_is_described(app: FastAPI, document: Document) -> None:
    hidden = {"/docs", "/openapi.json"}
    served = {
        (re.sub(r"{(\w+):\w+}", r"{\1}", route.path), method.lower())  # without converters
        for route in iter_route_contexts(app.routes)
        for method in route.methods or ()
        if route.path not in hidden
    }
    assert len(served) > 10
    assert served == {(path, method) for path, method, _ in operations(document)}


def test_every_operation_is_complete(document: Document) -> None:
    """It has an id, a summary, a success and an error with an example each, and takes keys."""
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(ids) == len(set(ids))
    for path, _, operation in operations(document):
        assert operation["summary"], path
        assert operation["description"], path
        assert operation["tags"], path
        assert "422" not in operation["responses"], path
        kinds = {"success": 0, "error": 0}
        for status, response in operation["responses"].items():
            assert response["description"], (path, status)
            for content in response["content"].values():
                assert "example" in content, (path, status)
                assert content["schema"], (path, status)
            kinds["error" if int(status) >= 400 else "success"] += 1
        assert min(kinds.values()) > 0, path
        queried = [one for one in operation.get("parameters", ()) if one["in"] == "query"]
        if queried or "requestBody" in operation:
            assert "400" in operation["responses"], path
        if path.startswith("/v1/"):
            assert operation["security"] == [{"key": []}]
            assert {"401", "403", "500", "503"} <= set(operation["responses"]), path
    scheme = document["components"]["securitySchemes"]["key"]
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")


def test_every_number_in_an_address_has_a_maximum(document: Document) -> None:
    """A database's integers have 64 bits: a larger one would be a fault."""
    checked = 0
    for path, _, operation in operations(document):
        for parameter in operation.get("parameters", ()):
            schema = parameter["schema"]
            for kind in schema.get("anyOf", [schema]):
                if kind.get("type") == "integer":
                    assert kind["maximum"] <= 2**53, (path, parameter["name"])
                    checked += 1
    assert checked > 5


def test_every_error_has_the_shared_shape(document: Document) -> None:
    shared = {"$ref": "#/components/schemas/ErrorAnswer"}
    for path, _, operation in operations(document):
        for status, response in operation["responses"].items():
            if int(status) >= 400 and path != "/health":
                assert response["content"]["application/json"]["schema"] == shared, (path, status)


def contents(node: object) -> Iterator[Document]:
    """Every media type of the document."""
    if isinstance(node, dict):
        if isinstance(node.get("content"), dict):
            yield from node["content"].values()
        for inner in node.values():
            yield from contents(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from contents(inner)


def test_every_example_fits_its_schema(document: Document) -> None:
    checked = 0
    for media in contents(document["paths"] | document["webhooks"]):
        if "example" not in media:
            continue
        schema = {**media["schema"], "components": document["components"]}
        jsonschema_rs.validate(schema, media["example"])
        checked += 1
    assert checked > 50
    broken = {"$ref": "#/components/schemas/JobPayload", "components": document["components"]}
    assert not jsonschema_rs.is_valid(broken, {"id": 1})


def test_the_document_is_valid_openapi(app: FastAPI, document: Document) -> None:
    assert document["openapi"].startswith("3.1")
    schemathesis.openapi.from_asgi("/openapi.json", app).validate()
    with pytest.raises(jsonschema_rs.ValidationError):
        schemathesis.openapi.from_dict({**document, "paths": {"/a": {"get": 1}}}).validate()


def test_bodies_that_routes_read_themselves_are_described(document: Document) -> None:
    schemas = document["components"]["schemas"]
    assert {body.__name__ for body in BODIES} <= set(schemas)
    made = document["paths"]["/v1/webhooks"]["post"]["requestBody"]["content"]
    assert made["application/json"]["schema"] == {"$ref": "#/components/schemas/NewWebhookBody"}
    assert schemas["NewWebhookBody"]["additionalProperties"] is False
    upload = document["paths"]["/v1/jobs"]["post"]
    assert set(upload["requestBody"]["content"]) >= {"application/jsonl"}
    named = {parameter["name"] for parameter in upload["parameters"]}
    assert named == {
        *("model", "metadata", "completion_window", "priority", "wait_for_model"),
        "keep_results",
        "Idempotency-Key",
    }
    batch = document["paths"]["/v1/batches"]["post"]
    assert [parameter["name"] for parameter in batch["parameters"]] == ["Idempotency-Key"]


HELLO = {"messages": [{"role": "user", "content": "hello"}]}
RANKED = {"query": "sky", "documents": ["a"]}
SENT_BY_CLIENTS: list[tuple[str, Document]] = [
    ("/v1/completions", {"model": "tiny", "prompt": "a", "stream": True}),
    ("/v1/completions", {"prompt": ["a"], "stop": "x", "user": "me", "echo": False, "n": None}),
    ("/v1/completions", {"prompt": [1, 2], "stop": ["x"], "bad_words": "y", "logprobs": 2}),
    ("/v1/chat/completions", {**HELLO, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**HELLO, "max_completion_tokens": 4, "tools": [], "store": False}),
    ("/v1/chat/completions", {**HELLO, "logprobs": True, "top_logprobs": 3, "max_tokens": None}),
    ("/v1/chat/completions", {**HELLO, "response_format": {"type": "text"}}),
    ("/v1/chat/completions", {**HELLO, "tool_choice": "none", "parallel_tool_calls": True}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "me"},
                {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None},
            ]
        },
    ),
    ("/v2/rerank", {**RANKED, "documents": [{"text": "a", "title": "b"}, "c"], "top_n": 1}),
    ("/v2/rerank", {**RANKED, "max_tokens_per_doc": None, "top_n": None, "priority": 3}),
    ("/v1/rerank", {**RANKED, "return_documents": True}),
]
REFUSED_BODIES: list[tuple[str, Document]] = [
    ("/v1/completions", {"prompt": ["a", "b"]}),
    ("/v1/completions", {"prompt": "a", "echo": True}),
    ("/v1/completions", {"prompt": "a", "functions": []}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {**HELLO, "response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", {**HELLO, "logprobs": 3}),
    ("/v2/rerank", {**RANKED, "documents": [{"title": "b"}]}),
    ("/v2/rerank", {**RANKED, "max_tokens_per_doc": 5}),
    ("/v2/rerank", {**RANKED, "stream": True}),
]


def allows(document: Document, path: str, body: Document) -> bool:
    """Whether the document allows this body."""
    made = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return jsonschema_rs.is_valid({**made["schema"], "components": document["components"]}, body)


@pytest.mark.parametrize(("path", "body"), SENT_BY_CLIENTS)
def test_what_clients_send_is_described_and_answered(
    client: TestClient, document: Document, path: str, body: Document
) -> None:
    assert allows(document, path, body)
    assert client.post(path, json=body).status_code == 200


@pytest.mark.parametrize(("path", "body"), REFUSED_BODIES)
def test_what_is_refused_is_not_described(
    client: TestClient, document: Document, path: str, body: Document
) -> None:
    assert not allows(document, path, body)
    assert client.post(path, json=body).status_code == 400


# Objects whose names are those of rows, models or other people's choice.
OPEN_OBJECTS = {"LineResponse.body"}


def test_no_answer_is_an_object_of_anything(document: Document) -> None:
    """A generated client would give its users a dictionary without names."""
    schemas = document["components"]["schemas"]
    answers = json.dumps([one["responses"] for _, _, one in operations(document)])
    todo, seen = set(re.findall(r"schemas/(\w+)", answers)), set[str]()
    while todo:
        seen.add(name := todo.pop())
        todo |= set(re.findall(r"schemas/(\w+)", json.dumps(schemas[name]))) - seen
    assert len(seen) > 30
    opened = {
        f"{name}.{field}"
        for name in seen
        for field, schema in schemas[name].get("properties", {}).items()
        if '"additionalProperties": true' in json.dumps(schema)
    }
    assert opened == OPEN_OBJECTS


def test_states_are_enumerated(document: Document) -> None:
    schemas = document["components"]["schemas"]
    for name, field, value in (
        ("BatchPayload", "status", "finalizing"),
        ("JobPayload", "state", "running"),
        ("FilePayload", "purpose", "batch_output"),
        ("DeliveryPayload", "type", "batch.expired"),
    ):
        kind = schemas[name]["properties"][field]["$ref"].rpartition("/")[2]
        assert value in schemas[kind]["enum"]


Call = tuple[str, str, httpx.Response]


def tour_of_open_jobs(call: Callable[..., Call], text: Mapping[str, Any]) -> Iterator[Call]:
    """Answers of the operations of open jobs; `text` is a body with an idempotency key."""
    opening = {"headers": {"idempotency-key": "open"}}
    yield call("POST", "/v1/jobs/open", **opening)
    opened = call("POST", "/v1/jobs/open", **opening)
    yield opened
    path = f"/v1/jobs/{opened[2].json()['id']}"
    for first in (0, 0, 7):
        sent = {"params": {"first": first}, "content": text["content"]}
        yield call("POST", f"{path}/rows", "/v1/jobs/{job_id}/rows", **sent)
    for rows in (2, 1):
        sent = {"params": {"rows": rows}}
        yield call("POST", f"{path}/seal", "/v1/jobs/{job_id}/seal", **sent)


def tour(client: TestClient, store: Store) -> Iterator[Call]:
    """Real answers of each operation: (path of the document, method, answer)."""

    def call(method: str, path: str, template: str | None = None, **sent: Any) -> Call:
        return template or path, method, client.request(method, path, **sent)

    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}}
    text = {"content": json.dumps(line), "headers": {"idempotency-key": "one"}}
    hook = {"url": "https://example.org/x", "events": ["job.completed"]}
    yield call("POST", "/v1/webhooks", json=hook)
    job_id, refs = planned(store, 3)
    claimed = claim(store, refs[0])
    store.leases.finish(refs[0].id, 0, "worker", answers(claimed))
    claimed = claim(store, refs[1])
    fault = NewResult.failure(claimed.requests[0].id, "internal_error", "oh", status=500)
    store.leases.finish(refs[1].id, 0, "worker", [fault])
    one = "/v1/jobs/{job_id}"
    yield call("GET", f"/v1/jobs/{job_id}", one)
    yield call("GET", f"/v1/jobs/{job_id}/results", f"{one}/results")
    for name in ("report", "report.html"):
        yield call("GET", f"/v1/jobs/{job_id}/{name}", f"{one}/{name}")
    yield call("POST", f"/v1/jobs/{job_id}/retry", f"{one}/retry")
    compute(store, refs[2])
    yield call("POST", "/v1/jobs", **text)
    yield call("POST", "/v1/jobs", **text)
    yield call("POST", "/v1/jobs", content=b"", params={"priority": "x"})
    yield call("POST", "/v1/jobs", **text, params={"model": "unknown"})
    yield call("GET", "/v1/jobs")
    yield call("GET", "/v1/jobs", params={"limit": 0})
    yield call("GET", "/v1/jobs/nope", one)
    waiting = submit(store, [{"prompt": "a"}])
    for step in ("pause", "resume", "cancel", "retry"):
        yield call("POST", f"/v1/jobs/{waiting}/{step}", f"{one}/{step}")
    yield from tour_of_open_jobs(call, text)
    done, (ref,) = planned(store, 1)
    compute(store, ref)
    for kind in ("output", "errors"):
        yield call("GET", f"/v1/jobs/{done}/{kind}", f"{one}/{kind}")
        yield call("GET", f"/v1/jobs/nope/{kind}", f"{one}/{kind}")
    yield call("GET", "/v1/webhooks")
    (webhook,) = store.webhooks.newest("default", 1)
    hook_path = "/v1/webhooks/{webhook_id}"
    yield call("GET", f"/v1/webhooks/{webhook.id}", hook_path)
    yield call("GET", f"/v1/webhooks/{webhook.id}/deliveries", f"{hook_path}/deliveries")
    (delivery,) = store.deliveries.newest(webhook.id, 1)
    again = "/v1/webhooks/deliveries/{delivery_id}/redeliver"
    yield call("POST", again.format(delivery_id=delivery.id), again)
    yield call("POST", f"/v1/webhooks/{webhook.id}", hook_path, json={"enabled": False})
    yield call("POST", again.format(delivery_id=delivery.id), again)
    yield call("POST", f"/v1/webhooks/{webhook.id}", hook_path, json={"enabled": "x"})
    yield call("DELETE", f"/v1/webhooks/{webhook.id}", hook_path)
    yield call("DELETE", f"/v1/webhooks/{webhook.id}", hook_path)
    yield call("GET", "/health")
    yield from tour_of_files(call)
    yield from tour_of_calls(call)
    yield from tour_of_models(call, store)
    yield from tour_of_schedules(call)


def tour_of_schedules(call: Callable[..., Call]) -> Iterator[Call]:
    one, path = "/v1/schedules/{schedule}", "/v1/schedules/rank"
    fields = {"cron": "0 2 * * *", "task": "rank.toml", "keep_results": "30d"}
    for minute in (0, 0, 5):
        yield call("PUT", path, one, json={**fields, "cron": f"{minute} 2 * * *"})
    yield call("PUT", "/v1/schedules/check", one, json=fields)
    yield call("PUT", path, one, json={"cron": "0 2 * * *", "file": "nope"} | _ENDPOINT)
    yield call("PATCH", path, one, json={"priority": 3, "keep_results": None})
    yield call("PATCH", path, one, json={"priority": 30})
    for step in ("pause", "resume", "run", "run"):
        yield call("POST", f"{path}/{step}", f"{one}/{step}")
    yield call("GET", path, one)
    yield call("GET", f"{path}/runs", f"{one}/runs")
    yield call("GET", f"{path}/runs", f"{one}/runs", params={"after": "job_1"})
    for name in ("", "/check", "/changes"):
        yield call("GET", f"/v1/schedules{name}")
    yield call("DELETE", path, one)
    yield call("DELETE", path, one)


def tour_of_files(call: Callable[..., Call]) -> Iterator[Call]:
    """Files and batches."""
    form = {"files": {"file": ("in.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
    made = call("POST", "/v1/files", **form)
    yield made
    yield call("POST", "/v1/files", data={"purpose": "batch"})
    file_id = made[2].json()["id"]
    one = "/v1/files/{file_id}"
    yield call("GET", "/v1/files")
    yield call("GET", "/v1/files", params={"after": "nope"})
    yield call("GET", f"/v1/files/{file_id}", one)
    yield call("GET", f"/v1/files/{file_id}/content", f"{one}/content")
    new = {"input_file_id": file_id, "endpoint": "/v1/completions"}
    batch = call("POST", "/v1/batches", json=new)
    yield batch
    yield call("POST", "/v1/batches", json={**new, "input_file_id": "nope"})
    batch_id = batch[2].json()["id"]
    yield call("GET", "/v1/batches")
    yield call("GET", f"/v1/batches/{batch_id}", "/v1/batches/{batch_id}")
    yield call("DELETE", f"/v1/files/{file_id}", one)  # refused: the batch reads it
    yield call("POST", f"/v1/batches/{batch_id}/cancel", "/v1/batches/{batch_id}/cancel")
    yield call("DELETE", f"/v1/files/{call('POST', '/v1/files', **form)[2].json()['id']}", one)
    yield call("GET", "/v1/files/nope", one)


def tour_of_calls(call: Callable[..., Call]) -> Iterator[Call]:
    """Single calls."""
    messages = [{"role": "user", "content": "a"}]
    ranking = {"query": "a", "documents": ["b", {"text": "c"}], "return_documents": True}
    for more in ({}, {"logprobs": 1}, {"stream": True}):
        yield call("POST", "/v1/completions", json={"prompt": "a", **more})
    for told in ({}, {"logprobs": True, "top_logprobs": 1}, {"stream": True}):
        yield call("POST", "/v1/chat/completions", json={"messages": messages, **told})
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        yield call("POST", path, json=ranking)
        yield call("POST", path, json={"query": 1})
    yield call("POST", "/v1/completions", json={"prompt": "a", "model": "other"})


def tour_of_models(call: Callable[..., Call], store: Store) -> Iterator[Call]:
    store.models.plan_for([PlannedModel("tiny", "f" * 64, 512)])
    yield call("GET", "/metrics")
    yield call("GET", "/v1/models")
    yield call("GET", "/v1/models/tiny", "/v1/models/{model}")
    yield call("GET", "/v1/models/nope", "/v1/models/{model}")


def test_real_answers_fit_the_types_that_a_client_makes(
    client: TestClient, store: Store, document: Document
) -> None:
    types = ClientTypes(document)
    answered = set()
    for path, method, answer in tour(client, store):
        responses = document["paths"][path][method.lower()]["responses"]
        media = answer.headers["content-type"].partition(";")[0]
        assert media in responses[str(answer.status_code)]["content"], (path, answer.text)
        if media == "application/json":
            wanted = types.of_answer(path, method, answer.status_code)
            msgspec.convert(answer.json(), wanted, strict=True)
        if answer.status_code < 400:
            answered.add((path, method.lower()))
    untoured = {
        operation["operationId"]
        for path, method, operation in operations(document)
        if (path, method) not in answered
    }
    assert untoured == NOT_TOURED


def test_the_types_of_a_client_are_strict(document: Document) -> None:
    error = ClientTypes(document).of({"$ref": "#/components/schemas/ErrorAnswer"})
    fields = {"message": "m", "type": "t", "param": None, "code": "c"}
    assert msgspec.convert({"error": fields}, error).error.code == "c"
    for wrong in ({**fields, "more": 1}, {"message": "m"}, {**fields, "code": 1}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"error": wrong}, error)


def test_unknown_paths_and_methods_have_the_shape_of_errors(client: TestClient) -> None:
    unknown, wrong = client.get("/v2/nope"), client.put("/v1/jobs")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_path")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "GET, POST"
    assert client.put("/v1/files/file-1").headers["allow"] == "DELETE, GET"


def test_a_fault_has_the_shape_of_errors_and_says_nothing_of_itself(store: Store) -> None:
    app = create_app(store, lambda job_id: None)

    @app.get("/fault")
    def fault() -> None:
        raise ZeroDivisionError("a prompt")

    answer = TestClient(app, raise_server_exceptions=False).get("/fault")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "prompt" not in answer.text


def test_the_command_prints_the_document_that_is_served(document: Document) -> None:
    done = nightjar("openapi")
    assert done.returncode == 0
    assert json.loads(done.stdout) == document


def test_no_route_lets_fastapi_copy_its_answer(app: FastAPI) -> None:
    """A page of results would be copied and checked field by field."""
    routes = [route.original_route for route in iter_route_contexts(app.routes)]
    ours = [route for route in routes if isinstance(route, APIRoute) and route.include_in_schema]
    assert len(ours) > 10
    for route in ours:
        returned = route.endpoint.__annotations__["return"]
        assert getattr(returned, "__name__", str(returned)).endswith("Response"), route.path

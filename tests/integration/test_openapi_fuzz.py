"""schemathesis sends what the document allows, and what it forbids, to the real application.

No answer is a fault, none has a status or a shape that the document does not name.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from nightjar.jobs.api import create_app
from nightjar.jobs.api.calls import CallPath, CallSettings
from nightjar.jobs.batch_records import NewBatch
from nightjar.jobs.events import NewWebhook
from nightjar.jobs.file_records import NewFile
from nightjar.jobs.store import Store
from nightjar.jobs.webhooks.addresses import AddressGuard
from nightjar.jobs.webhooks.signature import new_secret
from tests.call_worker import Worker
from tests.jobs import planned
from tests.outcomes import compute
from tests.schedules import Clock, add_schedule

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture
def store(sqlite_tables: str) -> Iterator[Store]:
    opened = Store(sqlite_tables, synchronous="normal")
    yield opened
    opened.close()


def known_ids(store: Store) -> dict[str, str]:
    """Ids of things that are there, by the name of the path's parameter."""
    new = NewWebhook("default", "https://example.org/", (), new_secret())
    webhook = store.webhooks.add(new)
    job_id, refs = planned(store, 2)
    for ref in refs:
        compute(store, ref)
    (delivery,) = store.deliveries.newest(webhook.id, 1)
    file_id = store.files.begin(NewFile("default", "in.jsonl"))
    store.files.append(file_id, 0, b"{}\n")
    store.files.end(file_id, 3, hashlib.sha256(b"{}\n").hexdigest())
    batch = store.batches.create(NewBatch("/v1/completions", file_id))
    schedule = add_schedule(store, Clock())
    store.schedule_runs.run_now("default", schedule.id, "test", schedule.created_at)
    return {
        "schedule": schedule.name,
        "file_id": file_id,
        "batch_id": batch.id,
        "job_id": job_id,
        "webhook_id": webhook.id,
        "delivery_id": delivery.id,
    }


def fuzz(store: Store, examples: int, **options: Any) -> int:
    """Send so many requests to each operation, in both modes; return how many were sent."""
    guard = AddressGuard(resolver=lambda host, port: ["93.184.216.34"])
    worker = Worker(store)
    calls = CallSettings(path=CallPath(worker.plan, worker.send))
    app = create_app(store, lambda job_id: None, served_model="tiny", guard=guard, calls=calls)
    document = TestClient(app).get("/openapi.json").json()
    for item in document["paths"].values():
        for operation in item.values():
            operation.pop("security", None)  # on loopback nobody asks for a key
    schema = schemathesis.openapi.from_dict(document)
    schema.app = app
    ids = known_ids(store)
    sent = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        known = {name: ids[name] for name in ids if f"{{{name}}}" in operation.path}
        # An id in a path may be any text: only the rest of a request can be against the document.
        can_be_wrong = any(map(len, (operation.query, operation.headers, operation.body)))
        for mode in list(GenerationMode)[: 2 if can_be_wrong else 1]:
            strategies = [operation.as_strategy(generation_mode=mode)]
            if known:
                strategies.append(
                    operation.as_strategy(generation_mode=mode, path_parameters=known)
                )
            for strategy in strategies:
                sent += send(strategy, checks_of(operation, mode), examples, options)
    worker.threads.shutdown()
    return sent


def checks_of(operation: APIOperation, mode: GenerationMode) -> list[Any]:
    """Where a body is read as JSON, what the document forbids must also be refused."""
    is_read = operation.path.startswith(("/v1/webhooks", "/v1/schedules"))
    is_strict = mode is GenerationMode.NEGATIVE and is_read
    return [*CHECKS, negative_data_rejection] if is_strict else CHECKS


def send(
    strategy: SearchStrategy[Case], checks: list[Any], examples: int, options: dict[str, Any]
) -> int:
    """Send so many requests of a strategy; return how many were sent."""
    sent = []

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        **options,
    )
    @given(case=strategy)
    def each(case: Case) -> None:
        case.call_and_validate(checks=checks)
        sent.append(case)

    each()
    return len(sent)


def test_every_answer_is_as_the_document_says(store: Store) -> None:
    assert fuzz(store, 2, derandomize=True) > 100


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_answer_is_as_the_document_says_for_long(store: Store) -> None:
    assert fuzz(store, 40) > 1_000

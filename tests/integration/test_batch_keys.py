"""Batches that are made twice with one `Idempotency-Key`, and those that wait for their model."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from nightjar.jobs.api import create_app
from nightjar.jobs.batch_records import NewBatch
from nightjar.jobs.errors import ReusedKeyError
from nightjar.jobs.models import PlannedModel
from nightjar.jobs.store import Store
from nightjar.jobs.store.waiting import SWEEPER
from nightjar.jobs.workers import ComputeSeconds
from tests.api_process import listening
from tests.batches import completions, ingest, lines_of, read_all, upload
from tests.processes import completion_line

LINES = lines_of(completions(2))


@pytest.fixture
def store(store: Store) -> Store:
    """A planner plans for two models, and a GPU worker serves one of them."""
    store.models.plan_for([PlannedModel("first", "a" * 64, 128), PlannedModel("second", "b", 64)])
    for owner in (SWEEPER, "gpu"):
        store.heartbeats.beat(owner, ComputeSeconds())
    store.models.serve("gpu", ["a" * 64])
    return store


@pytest.fixture
def client(store: Store) -> Iterator[openai.OpenAI]:
    with (
        listening(create_app(store, lambda _: None)) as url,
        openai.OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0) as opened,
    ):
        yield opened


def create(
    client: openai.OpenAI, file_id: str, key: str | None = "night", **extra: Any
) -> openai.types.Batch:
    return client.batches.create(
        input_file_id=file_id,
        endpoint="/v1/completions",
        completion_window="24h",
        extra_headers={} if key is None else {"Idempotency-Key": key},
        extra_body={"model": "first"} | extra,
    )


def test_the_same_key_and_content_answer_the_same_batch(
    client: openai.OpenAI, store: Store
) -> None:
    file_id = upload(store, LINES)
    made = create(client, file_id)
    assert create(client, file_id).id == made.id
    assert create(client, upload(store, LINES)).id == made.id  # uploaded once more
    assert create(client, file_id, key="other").id != made.id
    assert create(client, file_id, key=None).id not in {made.id, create(client, file_id, None).id}
    read_all(ingest(store, models="first second"))
    client.files.delete(file_id)
    again = create(client, file_id)
    assert (again.id, again.status) == (made.id, "in_progress")
    assert len(client.batches.list().data) == 4


def test_a_known_key_with_other_content_is_refused(client: openai.OpenAI, store: Store) -> None:
    file_id = upload(store, LINES)
    made = create(client, file_id, metadata={"night": "1"})
    others: list[tuple[str, dict[str, Any]]] = [
        (upload(store, lines_of(completions(3))), {}),
        (file_id, {"metadata": {"night": "2"}}),
        (file_id, {"model": "second"}),
        (file_id, {"strict": True}),
        (file_id, {"priority": 1}),
        (file_id, {"wait_for_model": True}),
        (file_id, {"completion_window": "1h"}),
        (file_id, {"endpoint": "/v1/rerank"}),
        (file_id, {"output_expires_after": {"anchor": "created_at", "seconds": 3_600}}),
    ]
    for other, fields in others:
        with pytest.raises(openai.ConflictError) as caught:
            create(client, other, **{"metadata": {"night": "1"}} | fields)
        assert caught.value.code == "idempotency_key_reused"
        assert f"made batch '{made.id}'" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        create(client, "file-unknown", metadata={"night": "1"})
    assert [one.id for one in client.batches.list()] == [made.id]


@pytest.mark.parametrize("key", ["", "x" * 256])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_bad_key(client: openai.OpenAI, store: Store, key: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, upload(store, LINES), key=key)
    assert (caught.value.code, caught.value.param) == (
        "invalid_idempotency_key",
        "Idempotency-Key",
    )


def test_keys_are_a_tenants_own(store: Store) -> None:
    made = [
        store.batches.create(
            NewBatch("/v1/completions", upload(store, LINES, tenant=tenant), tenant, **keyed)
        )
        for tenant in ("default", "other", "default")
        for keyed in ({"idempotency_key": "night", "digest": "a"},)
    ]
    assert made[0].id == made[2].id != made[1].id
    assert [one.tenant for one in made] == ["default", "other", "default"]


def test_of_calls_at_once_with_one_key_one_makes_the_batch(store: Store) -> None:
    files = [upload(store, LINES) for _ in range(4)]
    begin = threading.Barrier(len(files))

    def make(file_id: str, digest: str = "a") -> str:
        begin.wait(10)
        return store.batches.create(
            NewBatch("/v1/completions", file_id, idempotency_key="night", digest=digest)
        ).id

    with ThreadPoolExecutor(len(files)) as pool:
        ids = set(pool.map(make, files))
    assert len(ids) == 1
    assert [one.id for one in store.batches.newest(9, "default")] == list(ids)
    begin = threading.Barrier(1)
    with pytest.raises(ReusedKeyError):
        make(files[0], "b")


def named(model: str | None) -> bytes:
    extra = {} if model is None else {"model": model}
    return lines_of([completion_line("a", prompt="hello", max_tokens=4, **extra)])


@pytest.mark.parametrize(("model", "line"), [("third", None), (None, "third")])
def test_a_batch_may_wait_for_a_model_that_nobody_knows(
    client: openai.OpenAI, store: Store, model: str | None, line: str | None
) -> None:
    fields = {"model": model}
    made = create(client, upload(store, named(line)), **fields, wait_for_model=True)
    read_all(ingest(store, models="first second"))
    batch = client.batches.retrieve(made.id)
    assert (batch.status, batch.model) == ("in_progress", "third")
    waiting = store.jobs.waiting_for(made.id.replace("batch_", "job_"))
    assert [part.value for part in waiting.waits_for] == ["model"]
    # Without the field it is refused, at once or when its lines are read.
    if model is not None:
        with pytest.raises(openai.NotFoundError, match="wait_for_model=true"):
            create(client, upload(store, named(line)), key=None, **fields)
        return
    refused = create(client, upload(store, named(line)), key=None, **fields)
    read_all(ingest(store, models="first second"))
    (error,) = store.batches.get(refused.id, "default").errors
    assert error["code"] == "model_not_found"
    assert "wait_for_model=true" in error["message"]

"""The planner over real stores: every request once, whoever plans and whatever raises."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nightjar.jobs.records import EncodedRequest, QueuedRequest, RequestError
from nightjar.jobs.store import Store
from nightjar.pipeline.planning.encode import Encoder
from nightjar.pipeline.planning.models import PlanningModels
from nightjar.pipeline.planning.planner import Planner
from nightjar.pipeline.settings import Settings
from tests.jobs import submit

Encoded = tuple[list[EncodedRequest], list[tuple[int, RequestError]]]


def planner(store: Store, model: Path, **settings: object) -> Planner:
    given = Settings.read(model=model, **settings)
    return Planner(given, store, PlanningModels.open(given, store))


def plan_all(one: Planner) -> list[int]:
    """Plan until nothing waits; how many requests each chunk had."""
    chunks: list[int] = []
    while planned := one.plan_next():
        chunks.append(planned)
    return chunks


def members(store: Store, job_id: str) -> list[str]:
    """The custom_ids of all planned requests, as workers get them."""
    found: list[str] = []
    for ref in store.planning.dispatchable(1000):
        batch = store.leases.claim(ref.id, ref.epoch, "looker", ref.fingerprint)
        assert batch is not None
        assert batch.job_id == job_id
        found += [request.custom_id for request in batch.requests]
    return sorted(found)


def test_a_job_is_planned_in_chunks_and_dispatched_between(store: Store, tiny_model: Path) -> None:
    job_id = submit(store, [{"prompt": f"안녕 {n}", "max_tokens": 4} for n in range(25)])
    by_tens = planner(store, tiny_model, plan_chunk_requests=10)
    chunks = []
    for requests in (10, 10, 5, 0):
        assert by_tens.plan_next() == requests
        chunks.append(len(store.planning.dispatchable(1000)))
    assert chunks[0] < chunks[1] < chunks[2]
    assert members(store, job_id) == sorted(f"row-{n}" for n in range(25))
    assert store.backlog.jobs_to_plan() == []


def test_a_micro_batch_counts_its_prompts_and_the_longest_answers(
    store: Store, tiny_model: Path
) -> None:
    submit(store, [{"prompt": [5] * 10, "max_tokens": 7}, {"query": "a", "documents": ["b", "c"]}])
    plan_all(planner(store, tiny_model))
    assert sorted(ref.tokens for ref in store.planning.dispatchable(9)) == [3, 17]


def test_two_planners_plan_a_request_once(store: Store, tiny_model: Path) -> None:
    job_id = submit(store, [{"prompt": f"안녕 {n}", "max_tokens": 4} for n in range(60)])
    planners = [planner(store, tiny_model, plan_chunk_requests=7) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(plan_all, planners))
    assert members(store, job_id) == sorted(f"row-{n}" for n in range(60))


def test_a_request_that_breaks_the_encoder_fails_alone(
    store: Store, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(store, [{"prompt": text, "max_tokens": 4} for text in ("a", "poison", "b")])
    encode = Encoder.encode

    def breaks(self: Encoder, requests: list[QueuedRequest]) -> Encoded:
        if any(request.body["prompt"] == "poison" for request in requests):
            raise RuntimeError("the tokenizer panicked")
        return encode(self, requests)

    monkeypatch.setattr(Encoder, "encode", breaks)
    plan_all(planner(store, tiny_model))
    assert members(store, job_id) == ["row-0", "row-2"]
    (failure,) = store.results.read(job_id)
    assert failure.custom_id == "row-1"
    assert failure.error is not None
    assert (failure.error.code, failure.status_code) == ("internal_error", 500)

"""The planner over real stores: every request once, whoever plans and whatever raises."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nightjar.jobs.records import EncodedRequest, QueuedRequest, RequestError
from nightjar.jobs.store import Store
from nightjar.pipeline.planning.encode import Encoder
from nightjar.pipeline.planning.model_change import ModelChange
from nightjar.pipeline.planning.models import PlanningModels
from nightjar.pipeline.planning.planner import Planner
from nightjar.pipeline.settings import Settings
from tests.jobs import Body, submit
from tests.models import Gpt2Shape, save_gpt2

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


def test_models_take_turns_and_each_row_is_planned_for_its_own(
    store: Store, tiny_model: Path, tmp_path: Path
) -> None:
    other = save_gpt2(tmp_path / "other", Gpt2Shape(vocab_size=300), seed=1)
    given = Settings.read(models=f"a={tiny_model},b={other}", plan_chunk_requests=10)
    models = PlanningModels.open(given, store)
    of_a, of_b = (one.fingerprint for one in models)
    both = Planner(given, store, models)
    body: Body = {"prompt": "안녕하세요", "max_tokens": 4}
    bulk = submit(store, [body] * 30, model="a")
    submit(store, [body | {"model": "b"}, body, body | {"model": "c"}], model="a")
    late = submit(store, [body] * 5, model="b")
    unserved = submit(store, [body], model="c")
    assert [both.plan_next() for _ in range(2)] == [10, 5]
    planned = store.planning.dispatchable(1000)
    assert {(ref.job_id, ref.fingerprint) for ref in planned} == {(bulk, of_a), (late, of_b)}
    assert plan_all(both) == [10, 10, 3]
    assert store.backlog.jobs_to_plan() == [unserved]
    mixed = store.planning.dispatchable(1000)
    assert sorted(ref.fingerprint for ref in mixed if ref.job_id not in (bulk, late)) == sorted(
        [of_a, of_b]
    )
    assert store.jobs.waiting_for(unserved).waits_for  # and it is there still


def test_tokens_are_spent_over_all_models_of_a_chunk(
    store: Store, tiny_model: Path, tmp_path: Path
) -> None:
    other = save_gpt2(tmp_path / "other", Gpt2Shape(vocab_size=300), seed=1)
    given = Settings.read(models=f"a={tiny_model},b={other}", plan_chunk_tokens=20)
    both = Planner(given, store, PlanningModels.open(given, store))
    submit(
        store, [{"prompt": [5] * 20, "model": name, "max_tokens": 4} for name in "ab"], model="a"
    )
    assert plan_all(both) == [1, 1]


def test_any_name_means_the_only_model_where_that_is_accepted(
    store: Store, tiny_model: Path
) -> None:
    body: Body = {"prompt": "a", "max_tokens": 4}
    named = submit(store, [body | {"model": "b"}], model="b")
    assert plan_all(planner(store, tiny_model)) == []
    assert plan_all(planner(store, tiny_model, accept_any_model=True)) == [1]
    assert members(store, named) == ["row-0"]


def test_other_files_under_a_name_are_planned_anew_and_other_models_are_left(
    store: Store, tiny_model: Path, tmp_path: Path
) -> None:
    shape = Gpt2Shape(vocab_size=300)
    first, second = (save_gpt2(tmp_path / f"b{seed}", shape, seed=seed) for seed in (1, 2))

    def opened(of_b: Path) -> PlanningModels:
        given = Settings.read(models=f"a={tiny_model},b={of_b}")
        return PlanningModels.open(given, store)

    before, after = opened(first), opened(second)
    body: Body = {"prompt": "a", "max_tokens": 4}
    jobs = {name: submit(store, [body] * 3, model=name) for name in ("a", "b")}
    plan_all(Planner(Settings.read(), store, before))
    emptied: list[str] = []
    served = after.fingerprints
    kept = ModelChange(store.replanning, served, "finish", emptied.append)
    assert (kept.take_apart(), emptied) == (0, [])
    change = ModelChange(store.replanning, served, "replan", emptied.append)
    assert (change.take_apart(), change.take_apart()) == (3, 0)
    assert emptied == [before.fingerprints[1]]
    assert plan_all(Planner(Settings.read(), store, after)) == [3]
    found = {(ref.job_id, ref.fingerprint) for ref in store.planning.dispatchable(9)}
    assert found == {(jobs["a"], served[0]), (jobs["b"], served[1])}

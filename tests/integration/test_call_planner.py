"""Planning a call in the API gives what the planner would give."""

from pathlib import Path

import pytest

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import PlannedCall, RequestError
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.pipeline.planning.calls import CallPlanner
from nightjar.pipeline.planning.models import PlanningModels
from nightjar.pipeline.planning.planner import Planner
from nightjar.pipeline.settings import Settings
from tests.jobs import submit
from tests.models import Gpt2Shape, save_gpt2

BODIES: list[dict[str, object]] = [
    {"prompt": "hello blue sky", "max_tokens": 9},
    {"query": "hello", "documents": [" a", " blue sky"]},
]


@pytest.fixture
def settings(tiny_model: Path) -> Settings:
    return Settings(model=tiny_model)


def opened(settings: Settings, store: Store) -> CallPlanner:
    planner = CallPlanner(settings, lambda: PlanningModels.open(settings, store))
    planner.wait_ready()
    return planner


@pytest.mark.parametrize("body", BODIES)
def test_a_call_is_planned_as_a_row_is(
    settings: Settings, store: Store, body: dict[str, object]
) -> None:
    kind = RequestKind.RANK if "query" in body else RequestKind.GENERATE
    call = opened(settings, store).plan("job_1", "tiny", kind, validate_body(kind, body))
    assert isinstance(call, PlannedCall)
    models = PlanningModels.open(settings, store)
    planner = Planner(settings, store, models)
    job_id = submit(store, [body])
    assert planner.plan_next() == 1
    (ref,) = store.planning.dispatchable(1)
    assert call.fingerprint == ref.fingerprint == models.fingerprints[0]
    planned = call.micro_batch
    assert (planned.kind, planned.bucket, planned.tokens) == (ref.kind, ref.bucket, ref.tokens)
    claimed = store.leases.claim(ref.id, ref.epoch, "worker", ref.fingerprint)
    assert claimed is not None
    assert claimed.job_id == job_id
    assert [list(ids) for ids in call.encoded.segments] == claimed.requests[0].segments


def test_what_the_model_cannot_compute_is_refused(settings: Settings, store: Store) -> None:
    planner = opened(settings, store)
    kind = RequestKind.GENERATE
    body = validate_body(kind, {"prompt": "a", "max_tokens": 1_000})
    long = planner.plan("job_1", "tiny", kind, body)
    assert isinstance(long, RequestError)
    assert (long.code, long.param) == ("context_length_exceeded", "body.max_tokens")


def test_the_planner_plans_for_models_that_the_api_does_not_name(
    settings: Settings, store: Store
) -> None:
    planner = opened(settings, store)
    kind = RequestKind.GENERATE
    body = validate_body(kind, {"prompt": "a", "model": "gpt-9"})
    assert planner.plan("job_1", "gpt-9", kind, body) is None


def test_a_call_is_planned_for_the_model_that_it_names(
    store: Store, tiny_model: Path, tmp_path: Path
) -> None:
    other = save_gpt2(tmp_path / "other", Gpt2Shape(vocab_size=300), seed=1)
    settings = Settings(models=f"tiny={tiny_model},other={other}")
    planner = opened(settings, store)
    kind = RequestKind.GENERATE
    found = []
    for job_model, named in (("tiny", {}), ("other", {}), ("tiny", {"model": "other"})):
        body = validate_body(kind, {"prompt": "hello", "max_tokens": 2, **named})
        call = planner.plan("job_1", job_model, kind, body)
        assert isinstance(call, PlannedCall)
        found.append(call.fingerprint)
    tiny, second = (ModelDirectory.open(path).fingerprint for path in (tiny_model, other))
    assert found == [tiny, second, second]


def test_the_planner_plans_where_the_model_cannot_be_read_or_answers_are_kept(
    settings: Settings, store: Store
) -> None:
    def unreadable() -> PlanningModels:
        raise CheckpointError("there is no such directory")

    body = validate_body(RequestKind.GENERATE, {"prompt": "a"})
    blind = CallPlanner(settings, unreadable)
    blind.wait_ready()
    assert blind.plan("job_1", "tiny", RequestKind.GENERATE, body) is None
    keeping = opened(settings.model_copy(update={"reuse_results": True}), store)
    assert keeping.plan("job_1", "tiny", RequestKind.GENERATE, body) is None

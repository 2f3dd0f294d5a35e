"""Planning a call in the API gives what the planner would give."""

from pathlib import Path

import pytest

from nightjar.checkpoints import CheckpointError, ModelDirectory
from nightjar.jobs.lines.schemas import validate_body
from nightjar.jobs.records import PlannedCall, RequestError
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.pipeline.planning.calls import CallPlanner
from nightjar.pipeline.planning.planner import Planner
from nightjar.pipeline.settings import Settings
from tests.jobs import submit

BODIES: list[dict[str, object]] = [
    {"prompt": "hello blue sky", "max_tokens": 9},
    {"query": "hello", "documents": [" a", " blue sky"]},
]


@pytest.fixture
def settings(tiny_model: Path) -> Settings:
    return Settings(model=tiny_model)


def opened(settings: Settings, store: Store) -> CallPlanner:
    assert settings.model is not None
    path = settings.model
    planner = CallPlanner(settings, store, lambda: ModelDirectory.open(path))
    planner.wait_ready()
    return planner


@pytest.mark.parametrize("body", BODIES)
def test_a_call_is_planned_as_a_row_is(
    settings: Settings, store: Store, tiny_model: Path, body: dict[str, object]
) -> None:
    kind = RequestKind.RANK if "query" in body else RequestKind.GENERATE
    call = opened(settings, store).plan("job_1", kind, validate_body(kind, body))
    assert isinstance(call, PlannedCall)
    planner = Planner(settings, store, ModelDirectory.open(tiny_model))
    job_id = submit(store, [body])
    assert planner.plan_next() == 1
    (ref,) = store.planning.dispatchable(1)
    assert call.fingerprint == ref.fingerprint == planner.fingerprint
    planned = call.micro_batch
    assert (planned.kind, planned.bucket, planned.tokens) == (ref.kind, ref.bucket, ref.tokens)
    claimed = store.leases.claim(ref.id, ref.epoch, "worker", ref.fingerprint)
    assert claimed is not None
    assert claimed.job_id == job_id
    assert [list(ids) for ids in call.encoded.segments] == claimed.requests[0].segments


def test_what_the_model_cannot_compute_is_refused(settings: Settings, store: Store) -> None:
    planner = opened(settings, store)
    kind = RequestKind.GENERATE
    long = planner.plan("job_1", kind, validate_body(kind, {"prompt": "a", "max_tokens": 1_000}))
    assert isinstance(long, RequestError)
    assert (long.code, long.param) == ("context_length_exceeded", "body.max_tokens")
    other = planner.plan("job_1", kind, validate_body(kind, {"prompt": "a", "model": "gpt-9"}))
    assert isinstance(other, RequestError)
    assert other.code == "model_not_found"


def test_the_planner_plans_where_the_model_cannot_be_read_or_answers_are_kept(
    settings: Settings, store: Store
) -> None:
    def unreadable() -> ModelDirectory:
        raise CheckpointError("there is no such directory")

    body = validate_body(RequestKind.GENERATE, {"prompt": "a"})
    blind = CallPlanner(settings, store, unreadable)
    blind.wait_ready()
    assert blind.plan("job_1", RequestKind.GENERATE, body) is None
    keeping = opened(settings.model_copy(update={"reuse_results": True}), store)
    assert keeping.plan("job_1", RequestKind.GENERATE, body) is None

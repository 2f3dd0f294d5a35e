"""What a job may cost the planner, and what becomes of one that cannot be planned."""

from pathlib import Path

import pytest

from nightjar.jobs.errors import StoreError, StoreUnavailableError
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import EncodedRequest, NewJob, NewMicroBatch, NewRequest
from nightjar.jobs.states import JobState, RequestKind
from nightjar.jobs.store import Store
from nightjar.pipeline.planning.encode import Encoder
from nightjar.pipeline.planning.models import PlanningModels
from nightjar.pipeline.planning.planner import Planner
from nightjar.pipeline.settings import Settings
from tests.clock import Clock
from tests.jobs import submit
from tests.outcomes import codes

ATTEMPTS = 3


def planner(store: Store, model: Path, clock: Clock, **settings: object) -> Planner:
    given = Settings.read(model=model, plan_attempts=ATTEMPTS, accept_any_model=True, **settings)
    return Planner(given, store, PlanningModels.open(given, store), clock)


def submit_urgent(store: Store) -> str:
    body = validate_body(RequestKind.GENERATE, {"prompt": "now", "max_tokens": 4})
    with store.jobs.submit(NewJob("tiny", priority=9)) as submission:
        submission.add([NewRequest(0, 1, "row-0", RequestKind.GENERATE, body)])
    return submission.job_id


def test_an_urgent_job_waits_for_one_chunk_of_a_bulk_job(store: Store, tiny_model: Path) -> None:
    bulk = submit(store, [{"prompt": f"{n}", "max_tokens": 4} for n in range(30)])
    one = planner(store, tiny_model, Clock(), plan_chunk_requests=10)
    assert one.plan_next() == 10
    urgent = submit_urgent(store)
    assert one.plan_next() == 1
    assert store.backlog.queued_requests(urgent, 9) == []
    assert len(store.backlog.queued_requests(bulk, 99)) == 20


def test_a_chunk_ends_where_its_bytes_or_tokens_do(store: Store, tiny_model: Path) -> None:
    clock = Clock()
    submit(store, [{"prompt": "a" * 100, "max_tokens": 4}] * 6)
    (first, *_) = store.backlog.queued_requests(store.backlog.jobs_to_plan()[0], 1)
    assert first.size > 100
    by_bytes = planner(store, tiny_model, clock, plan_chunk_bytes=2 * first.size)
    assert by_bytes.plan_next() == 2
    by_tokens = planner(store, tiny_model, clock, plan_chunk_tokens=1)
    assert by_tokens.plan_next() == 4  # so little text is tokenized together
    assert by_tokens.plan_next() == 0


def test_a_chunk_takes_whole_groups_until_its_tokens_are_spent(
    store: Store, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightjar.pipeline.planning.planner._ENCODE_BYTES", 1)  # groups of one
    job_id = submit(store, [{"prompt": list(range(40, 50)), "max_tokens": 4}] * 9)
    one = planner(store, tiny_model, Clock(), plan_chunk_tokens=30)
    assert one.plan_next() == 3
    one = planner(store, tiny_model, Clock(), plan_chunk_tokens=31)
    assert one.plan_next() == 4
    assert store.jobs.get(job_id).failed == 0


def test_a_request_past_the_budget_comes_alone(store: Store) -> None:
    job_id = submit(store, [{"prompt": "é" * size} for size in (10, 5_000, 10)])
    assert [item.index for item in store.backlog.queued_requests(job_id, 9, 1_000)] == [0]
    assert [item.index for item in store.backlog.queued_requests(job_id, 9, 1)] == [0]
    assert [item.index for item in store.backlog.queued_requests(job_id, 9, 1 << 20)] == [0, 1, 2]
    (long,) = [item for item in store.backlog.queued_requests(job_id, 9) if item.index == 1]
    assert 10_000 < long.size < 10_100  # of UTF-8


def test_what_is_planned_already_counts_in_no_budget(store: Store) -> None:
    job_id = submit(store, [{"prompt": "a" * size} for size in (5_000, 10, 10, 10)])
    (large,) = store.backlog.queued_requests(job_id, 1)
    batch = NewMicroBatch(RequestKind.GENERATE, 32, [large.id], 1)
    store.planning.save_plan(job_id, [EncodedRequest(large.id, [[1]])], [batch], [])
    assert [item.index for item in store.backlog.queued_requests(job_id, 9, 1_000)] == [1, 2, 3]


def break_saving(store: Store, monkeypatch: pytest.MonkeyPatch, job_id: str, error: Exception):
    """`save_plan` raises for one job; returns the sizes of the chunks that it was given."""
    sizes: list[int] = []
    save = store.planning.save_plan

    def breaks(job: str, encoded, *rest, **named):
        if job != job_id:
            return save(job, encoded, *rest, **named)
        sizes.append(len(encoded))
        raise error

    monkeypatch.setattr(store.planning, "save_plan", breaks)
    return sizes


def test_a_job_that_cannot_be_planned_backs_off_and_fails_with_the_reason(
    store: Store, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    bad = submit(store, [{"prompt": f"{n}", "max_tokens": 4} for n in range(40)])
    good = submit(store, [{"prompt": "a", "max_tokens": 4}])
    sizes = break_saving(store, monkeypatch, bad, StoreError("the database refused the plan"))
    one = planner(store, tiny_model, clock)
    assert one.plan_next() == 1  # the failure
    assert one.plan_next() == 1
    assert store.backlog.queued_requests(good, 9) == []
    assert one.plan_next() == 0
    assert one.pause_s() == 1.0
    for pause in (1.0, 2.0):
        clock.now += pause
        assert one.plan_next() == 1
        assert one.plan_next() == 0
    assert sizes == [40, 40, 16]  # 4096 >> 4, 4096 >> 8
    assert store.jobs.get(bad).failed == 0
    clock.now += 60
    assert one.plan_next() == 40
    job = store.jobs.get(bad)
    assert (job.state, job.failed) == (JobState.FAILED, 40)
    error = store.results.read(bad)[0].error
    assert error is not None
    assert error.code == "internal_error"
    assert "in 3 attempts; the last time: StoreError: the database refused" in error.message
    monkeypatch.undo()
    assert store.retries.retry(bad) == 40
    assert one.plan_next() == 40
    assert store.jobs.get(bad).failed == 0


def test_a_failure_is_forgotten_when_the_planning_goes_on(
    store: Store, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    job_id = submit(store, [{"prompt": f"{n}", "max_tokens": 4} for n in range(3)])
    break_saving(store, monkeypatch, job_id, RuntimeError("a secret of the prompt"))
    one = planner(store, tiny_model, clock)
    one.plan_next()
    found = store.backlog.next_to_plan()
    assert found is not None
    assert (found.failures, found.error) == (1, "RuntimeError")
    monkeypatch.undo()
    clock.now += 1
    assert one.plan_next() == 3
    store.retries.retry(job_id)
    assert store.backlog.next_to_plan() is None


def test_a_database_that_is_away_is_no_failure_of_the_job(
    store: Store, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(store, [{"prompt": "a", "max_tokens": 4}])
    break_saving(store, monkeypatch, job_id, StoreUnavailableError("away"))
    one = planner(store, tiny_model, Clock())
    for _ in range(ATTEMPTS + 2):
        with pytest.raises(StoreUnavailableError):
            one.plan_next()
    monkeypatch.undo()
    assert one.plan_next() == 1
    assert store.jobs.get(job_id).failed == 0


def test_a_job_that_kills_its_planner_each_time_fails(
    store: Store, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = submit(store, [{"prompt": "a", "max_tokens": 4}])
    for _ in range(ATTEMPTS):
        store.planners.beat("gone", "{}")
        assert store.planners.take(job_id, "gone", 9)  # and no more is heard of that planner
        assert store.planners.drop("gone", 1) == 1
    one = planner(store, tiny_model, Clock())
    assert one.plan_next() == 1
    assert codes(store.results.read(job_id)) == ["internal_error"]
    error = store.results.read(job_id)[0].error
    assert error is not None
    assert "the planner ended while it planned the job" in error.message


def test_a_panic_of_the_tokenizer_fails_its_request_alone(
    store: Store, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As pyo3 raises it: no Exception."""

    job_id = submit(store, [{"prompt": text, "max_tokens": 4} for text in ("a", "poison", "b")])
    encode = Encoder.encode

    def panics(self: Encoder, requests):
        if any(request.body["prompt"] == "poison" for request in requests):
            raise Panic
        return encode(self, requests)

    monkeypatch.setattr(Encoder, "encode", panics)
    assert planner(store, tiny_model, Clock()).plan_next() == 3
    assert [record.index for record in store.results.read(job_id)] == [1]

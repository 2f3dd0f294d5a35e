"""Several planners share a job: each plans rows that no other has taken."""

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from nightjar.jobs.records import PlanningRange, RequestError
from nightjar.jobs.store import Store
from nightjar.pipeline.planning.agreement import Agreement, differences
from nightjar.pipeline.planning.encode import Encoder
from nightjar.pipeline.planning.models import PlanningModels
from nightjar.pipeline.planning.planner import Planner
from nightjar.pipeline.queue.sweeper import Sweeper
from nightjar.pipeline.settings import Settings
from tests.clock import Clock
from tests.jobs import submit

ROWS = 25


def planner(store: Store, model: Path, owner: str, **settings: object) -> Planner:
    given = Settings.read(model=model, **settings)
    return Planner(given, store, PlanningModels.open(given, store), owner=owner)


def a_job(store: Store, rows: int = ROWS) -> str:
    return submit(store, [{"prompt": f"안녕 {n}", "max_tokens": 4} for n in range(rows)])


def failures(store: Store) -> int:
    found = store.backlog.next_to_plan()
    assert found is not None
    return found.failures


def test_ranges_of_one_job_do_not_overlap(store: Store) -> None:
    job_id = a_job(store)
    taken = [store.planners.take(job_id, owner, 10) for owner in ("ann", "bob", "cy", "dee")]
    assert taken == [
        PlanningRange(job_id, 0, 10, is_lowest=True),
        PlanningRange(job_id, 10, 20, is_lowest=False),
        PlanningRange(job_id, 20, 30, is_lowest=False),
        None,
    ]
    rows = [store.backlog.queued_requests(job_id, 99, within=one) for one in taken if one]
    assert [request.index for part in rows for request in part] == list(range(ROWS))
    store.planners.release("bob")
    assert store.planners.take(job_id, "dee", 99) == PlanningRange(job_id, 10, 20, is_lowest=False)
    assert store.planners.take("no-such-job", "dee", 99) is None


def test_a_planner_narrows_no_range_but_its_own(store: Store) -> None:
    """One that was taken for dead and goes on."""
    job_id = a_job(store)
    store.planners.take(job_id, "frozen", 10)
    store.planners.release("frozen")
    taken = store.planners.take(job_id, "ann", 10)
    assert taken is not None
    store.planners.narrow("frozen", taken, 3)
    assert store.planners.take(job_id, "bob", 5) == PlanningRange(job_id, 10, 15, is_lowest=False)
    store.planners.narrow("ann", taken, 3)
    assert store.planners.take(job_id, "cy", 5) == PlanningRange(job_id, 3, 8, is_lowest=False)


def test_failures_of_a_job_are_of_its_lowest_range(store: Store) -> None:
    """So that a row that kills every planner is found out, however much is planned behind it."""
    job_id = a_job(store)
    low, high = (store.planners.take(job_id, owner, 5) for owner in ("ann", "bob"))
    assert failures(store) == 1
    refused = RequestError("invalid_value", "refused")
    for rows, left in ((high, 1), (low, 0)):
        (first, *_) = store.backlog.queued_requests(job_id, 1, within=rows)
        store.planning.save_plan(job_id, [], [], [(first.id, refused)])
        assert failures(store) == left
    assert store.planners.take(job_id, "cy", 5) is not None
    assert failures(store) == 0
    store.planners.release("ann")
    assert store.planners.take(job_id, "dee", 5, count_failure=False) is not None
    assert failures(store) == 0


def test_a_planner_that_dies_after_each_plan_loses_no_row(
    store: Store, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has planned is no failure, whether or not it gave its range back."""
    job_id = a_job(store, 60)
    for number in range(12):
        dying = planner(store, tiny_model, f"dying-{number}", plan_chunk_requests=5)
        dying.beat()
        (owner, counter), *_ = [one for one in store.planners.all() if one[0] == dying.owner]
        with monkeypatch.context() as patch:
            patch.setattr(store.planners, "release", lambda _: None)
            assert dying.plan_next() == 5
        store.planners.drop(owner, counter)
    assert store.backlog.jobs_to_plan() == []
    assert store.jobs.get(job_id).failed == 0


def test_a_planner_that_is_silent_gives_its_rows_back(store: Store) -> None:
    job_id, clock = a_job(store), Clock()
    for owner in ("ann", "bob"):
        store.planners.beat(owner, "{}")
        store.planners.take(job_id, owner, 10)
    sweeper = Sweeper(
        store,
        dead_after_s=10,
        redispatch_after_s=99,
        longest_gap_s=4,
        deaths_allowed=3,
        clock=clock,
    )
    for _ in range(7):
        clock.now += 2
        store.planners.beat("bob", "{}")
        sweeper.sweep()
    assert [owner for owner, _ in store.planners.all()] == ["bob"]
    assert store.planners.take(job_id, "cy", 99) == PlanningRange(job_id, 0, 10, is_lowest=True)
    assert store.planners.drop("bob", 1) == 0  # it has moved since
    store.planners.leave("bob")
    assert store.planners.all() == [("cy", 0)]
    assert store.planners.take(job_id, "dee", 99) is not None


def test_rows_of_a_planner_that_was_dropped_before_are_given_back(store: Store) -> None:
    """It was frozen, took rows again, and died before its next sign of life."""
    job_id = a_job(store)
    store.planners.take(job_id, "thawed", 10)
    assert list(store.planners.all()) == [("thawed", 0)]
    assert store.planners.drop("thawed", 0) == 1
    assert store.planners.take(job_id, "ann", 10) is not None
    assert list(store.planners.all()) == [("ann", 0)]
    store.planners.beat("ann", "{}")
    assert store.planners.drop("ann", 0) == 0


def test_each_row_is_encoded_once_by_planners_at_the_same_time(
    store: Store, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, seen = a_job(store, 200), Counter[int]()
    encode, both = Encoder.encode, Barrier(2)

    def counting(self: Encoder, requests):
        seen.update(request.index for request in requests)
        return encode(self, requests)

    monkeypatch.setattr(Encoder, "encode", counting)
    planners = [
        planner(store, tiny_model, owner, plan_chunk_requests=20) for owner in ("ann", "bob")
    ]

    def plan_all(one: Planner) -> int:
        both.wait(30)
        planned = 0
        while done := one.plan_next():
            planned += done
        return planned

    with ThreadPoolExecutor(2) as pool:
        planned = list(pool.map(plan_all, planners))
    assert seen == Counter(range(200))
    assert sum(planned) == 200
    assert min(planned) > 0
    assert store.backlog.jobs_to_plan() == []
    assert sum(ref.size for ref in store.planning.dispatchable(999)) == 200
    assert store.jobs.get(job_id).failed == 0


def test_rows_that_do_not_fit_into_a_chunk_are_left_to_others(
    store: Store, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_job(store)
    encode, others = Encoder.encode, []

    def looking(self: Encoder, requests):
        others.append(store.planners.take(requests[0].job_id, "bob", 99))
        store.planners.release("bob")
        return encode(self, requests)

    monkeypatch.setattr(Encoder, "encode", looking)
    size = store.backlog.queued_requests(*store.backlog.jobs_to_plan(), 1)[0].size
    ann = planner(store, tiny_model, "ann", plan_chunk_bytes=9 * size)
    assert 0 < (done := ann.plan_next()) < 10
    assert [one and one.first for one in others] == [done]


def test_a_planner_goes_on_where_another_was_killed(store: Store, tiny_model: Path) -> None:
    a_job(store)
    dead = planner(store, tiny_model, "dead", plan_chunk_requests=10)
    dead.beat()
    (job_id,) = store.backlog.jobs_to_plan()
    store.planners.take(job_id, "dead", 10)
    alive = planner(store, tiny_model, "alive", plan_chunk_requests=10)
    assert [alive.plan_next() for _ in range(3)] == [10, 5, 0]
    assert alive.pause_s() == 0.2
    assert store.planners.drop("dead", 1) == 1
    # A chunk is smaller after a failure.
    assert [alive.plan_next() for _ in range(3)] == [1, 9, 0]


def test_planners_with_other_settings_do_not_plan_together(
    store: Store, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ann = planner(store, tiny_model, "ann", micro_batch_tokens=900)
    bob = planner(store, tiny_model, "bob", micro_batch_tokens=901)
    assert differences(ann.plans_with, bob.plans_with) == (
        "micro_batch_tokens is 900 here and 901 there"
    )
    agreement = Agreement(store.planners, bob.plans_with)
    agreement.look("ann")
    assert not agreement.holds  # it has not said yet
    ann.beat()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            agreement.look("ann")
    assert not agreement.holds
    (said,) = (one.getMessage() for one in caplog.records if one.levelno == logging.ERROR)
    assert "micro_batch_tokens is 901 here and 900 there" in said
    planner(store, tiny_model, "ann", micro_batch_tokens=901).beat()
    agreement.look("ann")
    assert agreement.holds
    agreement.look(None)
    assert not agreement.holds

"""Whose job is planned next, and what a pass costs where there are many tenants."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.records import JobToPlan, NewJob
from nightjar.jobs.states import JobState, MicroBatchState, RequestKind, RequestState
from nightjar.jobs.store import Store
from nightjar.jobs.store.backlog import _FIRST_OF_TENANTS
from nightjar.jobs.store.common import TOKEN_COUNTS, now
from nightjar.jobs.store.precedence import _EDGES
from nightjar.jobs.store.ready import _RUNNABLE_OF_TENANT
from nightjar.jobs.store.shares import (
    _ANY_UNCHARGED,
    _IN_FLIGHT,
    _NOT_CHARGED,
    _TO_CHARGE,
    _WITH_READY,
)
from nightjar.jobs.store.submission import new_job_id
from nightjar.jobs.store.tables import job, micro_batch, request
from nightjar.jobs.store.waiting import WaitsFor
from nightjar.jobs.workers import ComputeSeconds
from nightjar.pipeline.planning.fair_turns import FairTurns
from nightjar.pipeline.planning.models import PlanningModels
from nightjar.pipeline.planning.planner import Planner
from nightjar.pipeline.settings import Settings
from tests.outcomes import claim
from tests.tenants import plan_for, set_weight, submit_for

TENANTS, JOBS, WINDOW = 1_000, 5_000, 16


def waiting_rows(store: Store, job_id: str) -> int:
    return len(store.backlog.queued_requests(job_id, 999))


def open_planner(store: Store, model: Path, **given_: object) -> Planner:
    read = Settings.read(model=model, accept_any_model=True, plan_chunk_requests=10, **given_)
    return Planner(read, store, PlanningModels.open(read, store))


def test_a_flood_keeps_no_other_tenants_job_from_being_planned(
    store: Store, tiny_model: Path
) -> None:
    flood = [submit_for(store, "flood", 30) for _ in range(4)]
    planner = open_planner(store, tiny_model)
    assert planner.plan_next() == 10
    calm = submit_for(store, "calm", 20)
    for left in (10, 10, 0, 0):  # in turns with the first of the flood
        assert planner.plan_next() == 10
        assert waiting_rows(store, calm) in {left, left + 10}
    assert waiting_rows(store, calm) == 0
    assert [waiting_rows(store, one) for one in flood] == [0, 30, 30, 30]


def test_turns_of_planning_follow_the_weights(store: Store, tiny_model: Path) -> None:
    set_weight(store, "gold", 3.0)
    jobs = {name: submit_for(store, name, 120) for name in ("gold", "silver")}
    planner = open_planner(store, tiny_model)
    for _ in range(12):
        planner.plan_next()
    assert {name: waiting_rows(store, one) for name, one in jobs.items()} == {
        "gold": 30,
        "silver": 90,
    }


def test_a_tenant_that_is_planned_far_ahead_yields(store: Store, tiny_model: Path) -> None:
    ahead, behind = submit_for(store, "ahead", 40), submit_for(store, "behind", 40)
    # Each request is a micro-batch, and four windows of one are enough.
    planner = open_planner(store, tiny_model, micro_batch_requests=1, dispatch_window=1)
    plan_for(store, "ahead", 5, fingerprint=ModelDirectory.open(tiny_model).fingerprint)
    assert planner.plan_next() == 10
    assert (waiting_rows(store, ahead), waiting_rows(store, behind)) == (40, 30)
    for _ in range(3):  # now both have enough, and take turns
        assert planner.plan_next() == 10
    assert (waiting_rows(store, ahead), waiting_rows(store, behind)) == (20, 20)


def test_a_job_that_cannot_be_planned_gives_its_turn_to_others_of_its_tenant(store: Store) -> None:
    first, second = submit_for(store, "a", 1), submit_for(store, "a", 1, priority=-1)
    other = submit_for(store, "b", 1)
    assert [item.id for item in store.backlog.first_of_tenants()] == [first, other]
    assert [item.id for item in store.backlog.first_of_tenants({first})] == [other, second]
    assert store.backlog.first_of_tenants({first, second, other}) == []
    set_weight(store, "b", 2.5)
    assert [item.weight for item in store.backlog.first_of_tenants()] == [1.0, 2.5]


def test_a_single_call_is_planned_before_the_jobs_of_other_tenants(store: Store) -> None:
    """Though it is younger than they are, and its tenant has had more."""
    older = [submit_for(store, name, 1, priority=9) for name in ("a", "b")]
    body = validate_body(RequestKind.GENERATE, {"prompt": "now", "max_tokens": 4})
    call = new_job_id()
    new = NewJob("tiny", tenant="c", completion_window_s=60)
    assert store.live.submit(new, call, RequestKind.GENERATE, body, None) is None
    found = store.backlog.first_of_tenants()
    assert [item.id for item in found] == [call, *older]
    assert [item.overtakes for item in found] == [True, False, False]


ROUNDS = st.lists(
    st.tuples(st.sets(st.sampled_from("abc"), min_size=1), st.integers(1, 100)), min_size=1
)


@given(rounds=ROUNDS, weights=st.tuples(*[st.sampled_from([0.5, 1.0, 4.0])] * 3))
def test_planning_is_fair_whoever_has_something_to_plan(
    rounds: list[tuple[set[str], int]], weights: tuple[float, float, float]
) -> None:
    """From any moment on, those that always wait differ by one chunk each, by weight."""
    items = {
        name: JobToPlan(name, 0, None, name, weight)
        for name, weight in zip("abc", weights, strict=True)
    }
    turns = FairTurns()
    for names, tokens in rounds:
        turns.charge(turns.in_turn([items[name] for name in sorted(names)])[0], tokens)
    planned = Counter[str]()
    for tokens in (100, 30, 70, 100) * 10:
        chosen = turns.in_turn(list(items.values()))[0]
        turns.charge(chosen, tokens)
        planned[chosen.tenant] += tokens
        by_weight = [planned[name] / item.weight for name, item in items.items()]
        assert max(by_weight) - min(by_weight) <= 2 * 100 / min(weights)


def test_a_job_says_that_other_tenants_go_first(store: Store) -> None:
    for owner in ("sweeper", "worker"):
        store.heartbeats.beat(owner, ComputeSeconds())
    (served,) = plan_for(store, "served", 1)
    (waits,) = plan_for(store, "waits", 1)
    assert "other work" in str(store.jobs.waiting_for(waits.job_id).message)
    claim(store, served)
    found = store.jobs.waiting_for(waits.job_id)
    assert found.waits_for == (WaitsFor.TURN,)
    assert "other tenants" in str(found.message)
    store.planning.mark_dispatched(plan_for(store, "waits", 1))
    assert "other tenants" not in str(store.jobs.waiting_for(waits.job_id).message)


def fill(store: Store) -> None:
    """Many tenants with open jobs, each with work that is ready and a row to plan."""
    moment = now()
    counts = dict.fromkeys(("completed", "failed", "cancelled", *TOKEN_COUNTS), 0)
    jobs: list[dict[str, Any]] = [
        {
            "id": f"job_{n:06}",
            "state": JobState.RUNNING if n % 2 else JobState.QUEUED,
            "model": "tiny",
            "metadata": "{}",
            "cancel_requested": False,
            "total": 2,
            "created_at": moment + timedelta(seconds=n),
            "tenant": f"tenant-{n % TENANTS}",
            **counts,
        }
        for n in range(JOBS)
    ]
    batches = [
        {
            "job_id": one["id"],
            "kind": RequestKind.GENERATE,
            "bucket": 32,
            "size": 1,
            "tokens": 10,
            "state": MicroBatchState.READY,
            "epoch": 0,
            "attempts": 0,
            "crashes": 0,
        }
        for one in jobs
    ]
    rows = [
        {
            "job_id": one["id"],
            "row_index": 0,
            "line": 1,
            "kind": RequestKind.GENERATE,
            "body": "{}",
            "state": RequestState.QUEUED,
        }
        for one in jobs
    ]
    names = [column.name for column in job.c if column.name not in {"id", "state"}]
    copied = [job.c[name] for name in names]
    with store.database.engine.begin() as connection:
        for table, values in ((job, jobs), (micro_batch, batches), (request, rows)):
            connection.execute(sa.insert(table), values)
        for turn in range(8):  # those of the weeks before, which are over
            over = sa.select(
                sa.literal(f"old_{turn}") + job.c.id, sa.literal("completed"), *copied
            ).where(job.c.id.like("job%"))
            connection.execute(sa.insert(job).from_select(["id", "state", *names], over))
    if not store.database.is_sqlite:
        with store.database.reading() as connection:
            connection.execute(sa.text("ANALYZE"))


@contextmanager
def counted(store: Store) -> Iterator[list[str]]:
    """The statements that run in the block."""
    found: list[str] = []

    def note(_: object, __: object, statement: str, *___: object) -> None:
        found.append(statement)

    engine = store.database.engine
    sa.event.listen(engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        sa.event.remove(engine, "before_cursor_execute", note)


def explained(store: Store, asked: sa.Select[Any]) -> str:
    parameters = {"of_model": "", "of_tenant": "tenant-7", "most": 16, "besides": ["job_x"]}
    used = {name: parameters[name] for name in asked.compile().params if name in parameters}
    engine = store.database.engine
    literal = str(asked.params(used).compile(engine, compile_kwargs={"literal_binds": True}))
    with engine.begin() as connection:
        if store.database.is_sqlite:
            return str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {literal}").all())
        return str(connection.exec_driver_sql(f"EXPLAIN {literal.replace('%', '%%')}").all())


@pytest.mark.every_database
def test_a_pass_over_many_tenants_is_bounded(store: Store) -> None:
    fill(store)
    with counted(store) as statements:
        found = store.planning.dispatchable(WINDOW)
    assert len({ref.job_id for ref in found}) == WINDOW
    assert len(statements) <= 12 + 3 * WINDOW
    with counted(store) as statements:
        assert len(store.backlog.first_of_tenants()) == TENANTS
    assert len([one for one in statements if one.startswith(("SELECT", "WITH"))]) == 2
    for asked in (_WITH_READY, _FIRST_OF_TENANTS, _RUNNABLE_OF_TENANT):
        plan = explained(store, asked)
        assert "ix_job_state_tenant" in plan, plan
        assert "ix_micro_batch_ready" in plan or "row_index" in plan, plan
    for asked in (_ANY_UNCHARGED, _NOT_CHARGED, _TO_CHARGE):
        assert "ix_micro_batch_uncharged" in explained(store, asked)
    assert "ix_micro_batch_state_job_id_id" in explained(store, _IN_FLIGHT)
    assert "ix_job_state_tenant" in explained(store, _EDGES)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_one_tenant_costs_one_statement_more_than_none(store: Store) -> None:
    plan_for(store, "default", 3)
    with counted(store) as statements:
        assert len(store.planning.dispatchable(WINDOW)) == 3
    assert not any("share" in one or "virtual_clock" in one for one in statements)
    # In flight, the tenants, two for the models, calls, suspects, jobs, micro-batches.
    assert len([one for one in statements if one.startswith("SELECT")]) == 8

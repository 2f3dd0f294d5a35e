"""Which models there are and who serves them, and whose jobs a planner is given."""

from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from nightjar.jobs.models import KnownModel, PlannedModel
from nightjar.jobs.store import Store
from nightjar.jobs.store.common import now
from nightjar.jobs.store.tables import worker
from nightjar.jobs.store.waiting import SILENT_AFTER_S, SWEEPER, Waiting, WaitsFor
from nightjar.jobs.workers import ComputeSeconds
from nightjar.pipeline.planning.models import WRITE_EVERY_S, KnownModels, PlanningModels
from nightjar.pipeline.settings import Settings
from tests.jobs import Body, submit
from tests.outcomes import claim
from tests.planned_models import ALPHA, BETA, GAMMA, plan

pytestmark = pytest.mark.one_database

BODY: Body = {"prompt": "a"}
MODELS = [PlannedModel("alpha", ALPHA, 128), PlannedModel("org/beta", BETA, 64)]


def serve(store: Store, owner: str, *fingerprints: str, silent_s: float = 0) -> None:
    """Let a worker live, or fall silent so long ago."""
    store.heartbeats.beat(owner, ComputeSeconds())
    store.models.serve(owner, fingerprints)
    if silent_s:
        values = {"seen_at": now() - timedelta(seconds=silent_s)}
        statement = sa.update(worker).where(worker.c.owner == owner).values(values)
        store.database.write(lambda connection: connection.execute(statement))


def served(store: Store) -> dict[str, int]:
    return {one.name: one.workers for one in store.models.known()}


def test_models_are_known_while_the_planner_plans_for_them(store: Store) -> None:
    assert store.models.known() == []
    store.models.plan_for(MODELS)
    first = store.models.known()
    assert [(one.name, one.fingerprint, one.context_length) for one in first] == [
        ("alpha", ALPHA, 128),
        ("org/beta", BETA, 64),
    ]
    store.models.plan_for(MODELS)  # nothing has changed
    assert store.models.known() == first
    store.models.plan_for([PlannedModel("alpha", GAMMA, 256)])  # other files under the same name
    (only,) = store.models.known()
    assert only == KnownModel("alpha", GAMMA, 256, only.created_at, 0)
    assert only.created_at > first[0].created_at


def test_who_serves_a_model_is_counted_while_it_lives(store: Store) -> None:
    store.models.plan_for(MODELS)
    assert served(store) == {"alpha": 0, "org/beta": 0}
    serve(store, "both", ALPHA, BETA)
    serve(store, "both", ALPHA, BETA)  # it says so every minute
    serve(store, "one", ALPHA)
    serve(store, "older", GAMMA)  # of files that are not planned for any more
    assert served(store) == {"alpha": 2, "org/beta": 1}
    assert [one.is_served for one in store.models.known()] == [True, True]
    store.models.leave("both")
    assert served(store) == {"alpha": 1, "org/beta": 0}
    serve(store, "one", ALPHA, silent_s=SILENT_AFTER_S + 1)
    assert served(store) == {"alpha": 0, "org/beta": 0}


def test_what_a_killed_worker_served_is_forgotten_after_a_day(store: Store) -> None:
    store.models.plan_for(MODELS)
    for owner, silent_s in (("killed", 25 * 3600), ("asleep", 23 * 3600)):
        serve(store, owner, ALPHA, silent_s=silent_s)
    store.models.plan_for(MODELS)
    for owner in ("killed", "asleep"):
        store.heartbeats.beat(owner, ComputeSeconds())  # as if it woke up
    assert served(store)["alpha"] == 1


def test_a_planner_is_given_the_jobs_of_its_model_alone(store: Store) -> None:
    unnamed = submit(store, [BODY])
    beta = submit(store, [BODY], model="org/beta")
    alpha = submit(store, [BODY], model="alpha", priority=1)

    def first(model: str, *besides: str, is_only: bool = False) -> tuple[str, str] | None:
        found = store.backlog.next_to_plan(besides, model, is_only=is_only)
        return None if found is None else (found.id, found.model)

    assert first("alpha") == (alpha, "alpha")
    assert first("alpha", alpha) is None
    assert first("org/beta") == (beta, "org/beta")
    assert first("tiny") == (unnamed, "tiny")
    # The only model of a deployment computes what names none, under whatever name it came.
    assert first("alpha", alpha, is_only=True) == (unnamed, "tiny")
    assert first("alpha", alpha, unnamed, is_only=True) is None


def test_a_job_whose_model_nobody_plans_for_says_so(store: Store) -> None:
    for owner in (SWEEPER, "gpu"):
        store.heartbeats.beat(owner, ComputeSeconds())
    named, unnamed = submit(store, [BODY], model="gamma"), submit(store, [BODY])
    assert store.jobs.waiting_for(named).waits_for == (WaitsFor.PLANNER,)  # nothing is known yet
    serve(store, "gpu", ALPHA, BETA)
    store.models.plan_for(MODELS)
    for job_id, name in ((named, "gamma"), (unnamed, "tiny")):
        waiting = store.jobs.waiting_for(job_id)
        assert waiting.waits_for == (WaitsFor.MODEL,)
        assert f"no planner plans for the model '{name}'" in (waiting.message or "")
    store.models.plan_for(MODELS[:1])
    assert store.jobs.waiting_for(named).waits_for == (WaitsFor.MODEL,)
    assert store.jobs.waiting_for(unnamed).waits_for == (WaitsFor.PLANNER,)  # any model will do


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_job_whose_model_nobody_serves_says_which(store: Store, is_planned: bool) -> None:
    store.heartbeats.beat(SWEEPER, ComputeSeconds())
    store.models.plan_for(MODELS)
    serve(store, "gpu", ALPHA)
    job_id = submit(store, [BODY, BODY], model="org/beta")
    refs = plan(store, job_id, BETA) if is_planned else []
    store.planning.mark_dispatched(refs[:1])
    waiting = store.jobs.waiting_for(job_id)
    assert waiting.waits_for == (WaitsFor.MODEL,)
    assert "no GPU worker serves 'org/beta'" in (waiting.message or "")
    serve(store, "other gpu", BETA)
    expected = WaitsFor.TURN if is_planned else WaitsFor.PLANNER
    assert store.jobs.waiting_for(job_id).waits_for == (expected,)
    serve(store, "other gpu", BETA, silent_s=60)
    for ref in refs[:1]:  # some of it is being computed all the same
        claim(store, ref)
        assert store.jobs.waiting_for(job_id) == Waiting()


def test_a_planner_makes_its_models_known_when_it_begins_to_lead(
    store: Store, tiny_model: Path
) -> None:
    now_s = [100.0]
    models = PlanningModels.open(Settings.read(model=tiny_model), store)
    known = KnownModels(store.models, models, lambda: now_s[0])

    def is_written(*, leads: bool) -> bool:
        store.models.plan_for(MODELS)  # as another planner would
        known.write(leads=leads)
        return [one.name for one in store.models.known()] == ["tiny"]

    assert not is_written(leads=False)
    assert is_written(leads=True)
    assert store.models.known()[0].context_length == 128
    now_s[0] += WRITE_EVERY_S - 1
    assert not is_written(leads=True)
    now_s[0] += 1
    assert is_written(leads=True)
    assert not is_written(leads=False)
    assert is_written(leads=True)  # it leads again: another may have written meanwhile

"""What a job waits for: whoever has to act is named, and nobody else."""

from datetime import timedelta

import pytest
import sqlalchemy as sa

from nightjar.jobs.errors import UnknownJobError
from nightjar.jobs.store import Store
from nightjar.jobs.store.common import now
from nightjar.jobs.store.tables import worker
from nightjar.jobs.store.waiting import SWEEPER, Waiting, WaitsFor
from nightjar.jobs.workers import ComputeSeconds
from nightjar.pipeline.embedded import patience as patience_module
from nightjar.pipeline.embedded.patience import Patience
from tests.jobs import planned, submit
from tests.outcomes import answers, claim, compute

pytestmark = pytest.mark.one_database

BODY: dict[str, object] = {"prompt": "a"}


def alive(store: Store, *owners: str) -> None:
    for owner in owners:
        store.heartbeats.beat(owner, ComputeSeconds())


def silent(store: Store, owner: str, seconds: float) -> None:
    """As if its last sign of life was so long ago."""
    alive(store, owner)
    values = {"seen_at": now() - timedelta(seconds=seconds)}
    with store.database.engine.begin() as connection:
        connection.execute(sa.update(worker).where(worker.c.owner == owner).values(values))


def test_nobody_is_there(store: Store) -> None:
    waiting = store.jobs.waiting_for(submit(store, [BODY]))
    assert waiting.waits_for == (WaitsFor.GPU_WORKER, WaitsFor.PLANNER)
    assert waiting.message is not None
    for said in ("no GPU worker has given a sign of life yet", "nightjar worker plan", "broker"):
        assert said in waiting.message


def test_who_has_fallen_silent_is_named_with_its_silence(store: Store) -> None:
    job_id = submit(store, [BODY])
    alive(store, SWEEPER)
    silent(store, "gpu", 600)
    waiting = store.jobs.waiting_for(job_id)
    assert waiting.waits_for == (WaitsFor.GPU_WORKER,)
    assert "no GPU worker has given a sign of life for 600 s" in (waiting.message or "")
    alive(store, "other gpu")
    silent(store, SWEEPER, 60)
    waiting = store.jobs.waiting_for(job_id)
    assert waiting.waits_for == (WaitsFor.PLANNER,)
    assert "no planner has given a sign of life for 60 s" in (waiting.message or "")


def test_a_job_on_its_way(store: Store) -> None:
    alive(store, SWEEPER, "gpu")
    unplanned = submit(store, [BODY])
    assert store.jobs.waiting_for(unplanned) == Waiting(
        (WaitsFor.PLANNER,), "its requests wait to be planned"
    )
    job_id, (ref,) = planned(store, 1)
    assert store.jobs.waiting_for(job_id).waits_for == (WaitsFor.TURN,)
    store.planning.mark_dispatched([ref])
    assert store.jobs.waiting_for(job_id).waits_for == (WaitsFor.TURN,)
    silent(store, SWEEPER, 60)  # the message is in the broker: no planner is needed for it
    assert store.jobs.waiting_for(job_id).waits_for == (WaitsFor.TURN,)
    claim(store, ref)
    assert store.jobs.waiting_for(job_id) == Waiting()
    silent(store, "gpu", 60)  # whoever holds it has fallen silent
    assert store.jobs.waiting_for(job_id).waits_for == (WaitsFor.GPU_WORKER,)


def test_a_job_that_nobody_has_to_go_on_with(store: Store) -> None:
    job_id, (ref,) = planned(store, 1)
    store.stopping.pause(job_id)
    waiting = store.jobs.waiting_for(job_id)
    assert waiting.waits_for == (WaitsFor.RESUME,)
    assert f"nightjar resume {job_id}" in (waiting.message or "")
    store.stopping.resume(job_id)
    compute(store, ref)
    assert store.jobs.get(job_id).is_over
    assert store.jobs.waiting_for(job_id) == Waiting()
    with pytest.raises(UnknownJobError):
        store.jobs.waiting_for("job_nobody")


def test_a_run_without_progress_says_once_what_it_waits_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience_module, "_PATIENCE_S", 0.0)
    heard: list[str] = []
    patience = Patience(store.jobs, heard.append)
    job_id, refs = planned(store, 2)
    for _ in range(3):
        patience.check(store.jobs.get(job_id))
    assert len(heard) == 1
    assert heard[0] == (
        "waits: the GPU worker and the planner of this run: starting, or loading the model"
    )
    alive(store, SWEEPER, "gpu")
    for _ in range(2):
        patience.check(store.jobs.get(job_id))
    assert heard[1:] == ["waits: its turn: the GPU workers compute other work first"]
    claim(store, refs[0])
    patience.check(store.jobs.get(job_id))
    assert len(heard) == 2
    claimed = claim(store, refs[1])
    assert store.leases.finish(claimed.id, claimed.epoch, "worker", answers(claimed))
    store.leases.give_back(refs[0].id, 0, "worker")
    for _ in range(2):  # progress, then none
        patience.check(store.jobs.get(job_id))
    assert heard[2:] == heard[1:2]


def test_a_worker_that_was_silent_for_a_day_is_not_recent(store: Store) -> None:
    alive(store, "yesterday", "today")
    long_ago = sa.update(worker).where(worker.c.owner == "yesterday")
    with store.database.engine.begin() as connection:
        connection.execute(long_ago.values(seen_at=now() - timedelta(days=1, hours=1)))
    assert [beat.owner for beat in store.heartbeats.recent()] == ["today"]

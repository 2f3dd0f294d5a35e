"""Schedules are read along indexes, however many runs there are."""

from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from nightjar.jobs.schedule_records import RunState, Schedule, Trigger
from nightjar.jobs.store import Store
from nightjar.jobs.store.schedule_tables import schedule_run
from tests.query_plans import explained, whole_reads
from tests.schedules import Clock, add_schedule


def test_schedules_and_their_runs_are_read_by_an_index(store: Store) -> None:
    """Statistics of many runs, as a nightly schedule of years has them."""
    seen = [add_schedule(store, Clock(), f"nightly-{n}") for n in range(3)]
    start = datetime(2020, 1, 1, tzinfo=UTC)
    made = [run_values(one, start + timedelta(days=n)) for one in seen for n in range(1_500)]
    store.database.write(lambda connection: connection.execute(sa.insert(schedule_run), made))
    with store.database.engine.begin() as connection:
        connection.exec_driver_sql("ANALYZE")
    with explained(store) as statements:
        overview = store.schedules.overview("default", 100)
        runs = store.schedule_runs.newest(seen[0].id, 31, "run_1")
    assert (len(overview), len(runs)) == (3, 31)
    assert len(statements) == 2
    for statement, plan in statements:
        assert whole_reads(plan, ("schedule_run",)) == [], (statement, plan)


def run_values(schedule: Schedule, moment: datetime) -> dict[str, object]:
    """A run that succeeded, as its row."""
    times = ("planned_at", "begin_at", "deadline_at", "created_at", "ended_at")
    zeros = ("missed", "attempts", "epoch", "beats", "total", "completed", "failed")
    return {
        **dict.fromkeys(times, moment),
        **dict.fromkeys(zeros, 0),
        "id": f"run_0{schedule.id}{moment:%Y%m%d}"[:64],
        "schedule_id": schedule.id,
        "tenant": schedule.tenant,
        "trigger": Trigger.PLANNED,
        "state": RunState.SUCCEEDED,
        "cancels_job": False,
    }

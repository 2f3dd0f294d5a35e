"""Partitions of PostgreSQL: made when they are missing, read alone, dropped whole."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from nightjar.jobs.purge_records import PurgeScope
from nightjar.jobs.store import Store, partitions
from nightjar.jobs.store.common import today
from nightjar.jobs.store.parts import first_job_id, part_of_day, part_of_job
from nightjar.jobs.store.submission import new_parted_job_id
from nightjar.jobs.store.tables import request
from tests.bulk_jobs import finished_job
from tests.jobs import planned, submit
from tests.outcomes import answers, claim, compute
from tests.query_plans import explained

DAY_S = 86_400.0
SETTING = PurgeScope(keep_s=3 * DAY_S)


@pytest.fixture
def store(postgres_tables: str) -> Iterator[Store]:
    """A store over PostgreSQL, with tables and no jobs."""
    opened = Store(postgres_tables)
    yield opened
    opened.close()


def parts(store: Store) -> list[int]:
    """The parts of which partitions are there, less today: -1 is of yesterday."""
    query = (
        "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace "
        "AND relkind = 'r' AND relname ~ '_p[1-9]'"
    )
    with store.database.reading() as connection:
        names = connection.exec_driver_sql(query).scalars().all()
    return sorted({int(name.rpartition("_p")[2]) - part_of_day(today()) for name in names})


def rows(store: Store, job_id: str) -> int:
    """How many requests of the job are stored."""
    own = sa.select(sa.func.count()).where(request.c.job_id == job_id)
    with store.database.reading() as connection:
        return int(connection.scalar(own) or 0)


def old(store: Store, *, made_days: float, ended_days: float | None = None, count: int = 20) -> str:
    """A job that is over, submitted and ended so many days ago."""
    days = made_days if ended_days is None else ended_days
    return finished_job(store, count, days=days, made_days=made_days)


def test_an_id_says_the_same_part_here_and_in_the_database(store: Store) -> None:
    ids = [
        *(new_parted_job_id(days * DAY_S) for days in (0, 1, 400)),
        "job_018bcfe568001234567890abcdef",
        "job_018bcfe56800p",
        "mine",
        "job_018bcfe5680gp",
    ]
    asked = sa.select(sa.func.nightjar_part(sa.bindparam("of", type_=sa.Text)))
    with store.database.reading() as connection:
        assert [connection.scalar(asked, {"of": one}) for one in ids] == [
            part_of_job(one) for one in ids
        ]
    assert [part_of_job(one) > 0 for one in ids] == [True, True, True, False, True, False, False]
    part = part_of_job(ids[0])
    assert first_job_id(part) <= ids[0] < first_job_id(part + 1)


def test_a_partition_that_is_missing_at_midnight_is_made_by_the_submission(store: Store) -> None:
    """The beat has been away: the job of a day without partitions lands, and computes."""
    missing = new_parted_job_id(-5 * DAY_S)
    assert 5 not in parts(store)
    submit(store, [{"prompt": "a"}] * 3, job_id=missing)
    assert 5 in parts(store)
    with store.database.reading() as connection:
        ids = connection.scalars(sa.select(request.c.id).where(request.c.job_id == missing)).all()
    assert {id_ >> 40 for id_ in ids} == {part_of_job(missing)}
    assert rows(store, missing) == 3


def test_partitions_are_made_ahead_and_look_like_the_first(store: Store) -> None:
    with store.database.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE result_p0 SET (autovacuum_enabled = off)")
    store.partitions.make_ahead()
    store.partitions.make_ahead()
    assert parts(store) == [*range(partitions.DAYS_AHEAD + 1)]
    last = part_of_day(today()) + partitions.DAYS_AHEAD
    query = "SELECT relname, reloptions FROM pg_class WHERE relname LIKE %s AND relkind = 'r'"
    with store.database.reading() as connection:
        found = {
            name: set(options)
            for table in ("request", "result")
            for name, options in connection.exec_driver_sql(query, (f"{table}\\_p%",)).all()
        }
    assert "autovacuum_enabled=off" in found["result_p0"]
    assert "fillfactor=50" in found["request_p0"]
    assert found[f"result_p{last}"] == found["result_p0"]
    assert found[f"request_p{last}"] == found["request_p0"]


def test_a_day_whose_jobs_are_all_purged_goes_without_a_delete(store: Store) -> None:
    gone = [old(store, made_days=10), old(store, made_days=10)]
    kept = old(store, made_days=2)
    assert parts(store)[:2] == [-10, -2]
    store.retention.sweep(SETTING)
    assert parts(store)[0] == -2
    assert [rows(store, job_id) for job_id in (*gone, kept)] == [0, 0, 20]
    assert all(store.jobs.get(job_id).purged_at is not None for job_id in gone)
    assert store.jobs.get(kept).purged_at is None
    store.retention.sweep(SETTING)
    assert store.purging.marked(PurgeScope()) == []


def test_a_job_waits_a_while_for_the_others_of_its_day(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a job that is kept longer its rows are deleted in the end."""
    early = old(store, made_days=10)
    late = old(store, made_days=10, ended_days=1)
    store.retention.sweep(SETTING)
    assert store.jobs.get(early).purged_at is not None
    assert [rows(store, job_id) for job_id in (early, late)] == [20, 20]
    monkeypatch.setattr("nightjar.jobs.store.purging.WAITS_S", 0.0)
    store.retention.sweep(SETTING)
    assert [rows(store, job_id) for job_id in (early, late)] == [0, 20]
    assert -10 in parts(store)


def test_processes_that_drop_a_day_at_once(store: Store) -> None:
    job_id = old(store, made_days=10)
    (one,) = store.retention.expendable(SETTING, 10)
    assert store.retention.mark(one)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: store.purging.drop_parts(), range(4)))
    store.retention.sweep(SETTING)
    assert -10 not in parts(store)
    assert store.purging.marked(PurgeScope()) == []
    assert rows(store, job_id) == 0


def test_a_purge_of_all_that_is_old_drops_whole_days(store: Store) -> None:
    """By hand, and nothing of it waits: what shares its day with a kept job is deleted."""
    for _ in range(2):
        old(store, made_days=10)
    beside, kept = old(store, made_days=9), old(store, made_days=9, ended_days=1)
    report = store.retention.sweep(PurgeScope(older_than_s=5 * DAY_S))
    assert (report.jobs, report.rows) == (3, 20)
    assert parts(store)[0] == -9
    assert [rows(store, job_id) for job_id in (beside, kept)] == [0, 20]


def test_a_purge_of_one_job_waits_for_nobody(store: Store) -> None:
    early, late = old(store, made_days=10), old(store, made_days=10)
    report = store.retention.sweep(PurgeScope(job_id=early))
    assert (report.jobs, report.rows) == (1, 20)
    assert [rows(store, job_id) for job_id in (early, late)] == [0, 20]


def test_a_day_of_a_job_that_still_runs_stays(store: Store) -> None:
    """The retention is shorter than the job: it is purged when it is over, and not before."""
    running, refs = planned(store, 4, each=2, job_id=new_parted_job_id(10 * DAY_S))
    over = old(store, made_days=10)
    store.retention.sweep(SETTING)
    assert store.jobs.get(over).purged_at is not None
    assert -10 in parts(store)
    for ref in refs:
        claimed = claim(store, ref)
        assert store.leases.finish(ref.id, ref.epoch, "worker", answers(claimed))
    assert store.jobs.get(running).completed == 4


def test_a_partition_that_a_reader_holds_goes_later(store: Store) -> None:
    """A client pages, or a backup runs: nobody waits for it, and the partition goes after it."""
    job_id = old(store, made_days=10)
    with store.database.snapshot() as reader:
        reader.execute(sa.select(request.c.id).where(request.c.job_id == job_id)).all()
        store.retention.sweep(SETTING)
        assert -10 in parts(store)
        fresh, refs = planned(store, 2, each=2)  # others go on meanwhile
        compute(store, refs[0])
        assert store.jobs.get(fresh).completed == 2
    store.retention.sweep(SETTING)
    assert -10 not in parts(store)


def days_beside(store: Store) -> None:
    """Make the partitions of 30 days."""
    for day in range(30):
        with store.database.engine.connect() as connection:
            partitions.ensure_part(store.database, connection, new_parted_job_id(day * DAY_S))


def test_a_plan_for_any_job_reads_its_partition_alone(store: Store) -> None:
    """A prepared statement may be planned once, before its values are known."""
    days_beside(store)
    job_id, _ = planned(store, 4)
    with store.database.engine.connect() as connection:
        connection.exec_driver_sql("SET LOCAL plan_cache_mode = force_generic_plan")
        connection.exec_driver_sql(
            "PREPARE ask (text) AS SELECT id FROM request "
            "WHERE job_id = $1 AND (id >> 40) = nightjar_part($1)"
        )
        found = connection.exec_driver_sql(f"EXPLAIN (ANALYZE) EXECUTE ask ('{job_id}')").scalars()
        plan = "\n".join(found)
        connection.exec_driver_sql("DEALLOCATE ask")
    assert "$1" in plan
    assert {f"request_p{part_of_job(job_id)}"} == set(re.findall(r" on (request_p\d+)", plan))
    assert "Subplans Removed: 3" in plan


def test_statements_of_a_job_read_its_partition_alone(store: Store) -> None:
    """With 30 days beside it, where PostgreSQL knows the values when it plans."""
    days_beside(store)
    with explained(store, ("SELECT", "WITH", "UPDATE", "DELETE")) as statements:
        job_id, refs = planned(store, 4, each=2)
        compute(store, refs[0])
        store.stopping.cancel(job_id)
        store.results.page(job_id)
        store.jobs.waiting_for(job_id)
        store.failures.reasons(job_id)
    assert len(statements) > 20
    own = f"_p{part_of_job(job_id)}"
    for statement, plan in statements:
        others = {word for word in plan.split() if "_p" in word and word[-1].isdigit()}
        assert not {one for one in others if own not in one}, (statement, plan)

"""How PostgreSQL runs what is asked every second while a big job is under way.

Its estimates decide: of tables that it has never looked through, and of rows that are over, which
it thinks are spread among the others and which are the first.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from nightjar.jobs.states import RequestState
from nightjar.jobs.store import Store
from nightjar.jobs.store.common import today
from nightjar.jobs.store.parts import PART_BITS, part_of_day, part_of_job
from nightjar.jobs.store.tables import job, micro_batch, request_body
from nightjar.jobs.store.tables import request as requests
from tests.jobs import planned

ROWS = 6_000


def partition(table: sa.Table) -> str:
    """The partition of jobs that are submitted today."""
    return f"{table.name}_p{part_of_day(today())}"


@pytest.fixture
def engine(postgres_tables: str) -> Iterator[sa.Engine]:
    made = sa.create_engine(postgres_tables)
    yield made
    made.dispose()


@pytest.fixture
def store(postgres_tables: str, engine: sa.Engine) -> Iterator[Store]:
    """A store whose tables nobody analyses but the test."""
    opened = Store(postgres_tables)
    with engine.begin() as connection:
        for name in (partition(requests), micro_batch.name, job.name):
            connection.exec_driver_sql(f"ALTER TABLE {name} SET (autovacuum_enabled = off)")
    yield opened
    opened.close()


@pytest.fixture(params=["none", "of the beginning", "of now"])
def big_job(request: pytest.FixtureRequest, store: Store, engine: sa.Engine) -> str:
    """A job whose first half is over and whose second half is in no micro-batch yet, and whose
    statistics are none, of when all of it waited, or of now."""
    job_id, _ = planned(store, 1)
    row = requests.c
    copied = [column for column in row if column.name not in ("id", "row_index", "custom_id")]
    id_ = (part_of_job(job_id) << PART_BITS) + 1_000 + sa.column("n", sa.BigInteger)
    numbers = sa.func.generate_series(1, ROWS).table_valued("n").render_derived()
    values = sa.select(id_, numbers.c.n, sa.cast(numbers.c.n, sa.Text), *copied)
    values = values.select_from(sa.join(requests, numbers, sa.true())).where(row.job_id == job_id)
    names = ["id", "row_index", "custom_id", *(column.name for column in copied)]
    waiting = {"state": RequestState.QUEUED, "micro_batch_id": None}
    bodies = sa.select(row.id, sa.literal("{}")).where(row.row_index > 0)
    with engine.begin() as connection:
        connection.execute(sa.insert(requests).from_select(names, values))
        connection.execute(sa.insert(request_body).from_select(["request_id", "body"], bodies))
        (of,) = connection.scalars(sa.select(row.micro_batch_id).where(row.row_index == 0))
        connection.execute(sa.update(requests).where(row.row_index > 0).values(waiting))
        if request.param == "of the beginning":
            connection.exec_driver_sql("ANALYZE")
        over = {"state": RequestState.DONE, "micro_batch_id": of}
        connection.execute(sa.update(requests).where(row.row_index <= ROWS // 2).values(over))
        # As where each row's new version finds room beside the old one.
        connection.exec_driver_sql(
            f"CLUSTER {partition(requests)} USING {partition(requests)}_job_id_row_index_key"
        )
        if request.param == "of now":
            connection.exec_driver_sql("ANALYZE")
    return job_id


def rows_read(engine: sa.Engine, ask: Callable[[], Any]) -> float:
    """Rows of requests and bodies that `ask` looks at, as EXPLAIN ANALYZE counts them."""
    asked: list[tuple[str, Any]] = []

    def note(_: object, __: object, statement: str, parameters: Any, *___: object) -> None:
        asked.append((statement, parameters))

    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        ask()
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)
    found = 0.0
    with engine.connect() as connection:
        for statement, parameters in asked:
            if statement.lstrip().startswith("SELECT"):
                explain = f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}"
                (plan,) = connection.exec_driver_sql(explain, parameters).scalar_one()
                found += _read(plan["Plan"])
            connection.rollback()
    assert asked
    return found


def _read(node: dict[str, Any]) -> float:
    rows = 0.0
    if node.get("Relation Name") in {requests.name, request_body.name}:
        looked_at = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
        rows = looked_at * node["Actual Loops"]
    return rows + sum(_read(inner) for inner in node.get("Plans", []))


def test_a_tick_reads_the_first_rows_that_wait(
    store: Store, engine: sa.Engine, big_job: str
) -> None:
    assert rows_read(engine, store.backlog.jobs_to_plan) <= 1
    assert rows_read(engine, store.orphans.land) <= 1
    assert rows_read(engine, lambda: store.backlog.queued_requests(big_job, 4)) <= 4 + 4
    assert rows_read(engine, lambda: store.planning.dispatchable(4)) == 0

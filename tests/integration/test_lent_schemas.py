"""A test that is lent a schema of PostgreSQL finds it as if the tables had just been made."""

from contextlib import closing
from random import randbytes

import pytest
import sqlalchemy as sa

from nightjar.jobs.store import Store
from tests.jobs import submit
from tests.postgres_schemas import SMALL_BYTES, Schemas


def ids_of_rows(url: str, rows: int, prompt: str) -> list[int]:
    """Submit a job of so many rows; their ids."""
    with closing(Store(url)) as store:
        job_id = submit(store, [{"prompt": prompt}] * rows)
        assert [job.id for job in store.jobs.newest(10)] == [job_id]
        return [request.id for request in store.backlog.queued_requests(job_id, rows)]


@pytest.mark.parametrize("bytes_", [1, SMALL_BYTES])
def test_the_next_one_finds_no_rows_and_the_first_ids(
    postgres_schemas: Schemas, bytes_: int
) -> None:
    rows, prompt = 4, randbytes(bytes_).hex()
    with postgres_schemas.lent() as before:
        first = ids_of_rows(before, rows, prompt)
    with postgres_schemas.lent() as after:
        assert after != before
        with closing(Store(after)) as store, store.database.reading() as connection:
            for (table,) in connection.execute(
                sa.text("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()")
            ):
                count = connection.execute(sa.select(sa.func.count()).select_from(sa.table(table)))
                assert count.scalar_one() == (table == "alembic_version"), table
        assert ids_of_rows(after, rows, prompt) == first


@pytest.mark.parametrize(
    "statement",
    [
        "DROP INDEX ix_request_following",
        "ALTER TABLE job ADD COLUMN other INTEGER",
        "ALTER TABLE request_p0 SET (autovacuum_enabled = off)",
        "CREATE TABLE other (id INTEGER)",
        "ANALYZE alembic_version",
    ],
)
def test_what_is_no_longer_as_it_was_made_is_lent_to_nobody(
    postgres_schemas: Schemas, statement: str
) -> None:
    with postgres_schemas.lent() as url, closing(Store(url)) as store:
        store.database.write(lambda connection: connection.exec_driver_sql(statement))
        oid = oid_of_jobs(store)
    with postgres_schemas.lent() as url, closing(Store(url)) as store:
        assert oid_of_jobs(store) != oid


def oid_of_jobs(store: Store) -> int:
    """What tells one schema's table from another's, whatever the schema is called."""
    with store.database.reading() as connection:
        return int(connection.exec_driver_sql("SELECT 'job'::regclass::oid").scalar_one())

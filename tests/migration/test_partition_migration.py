"""Rows of before the partitions, and what a process of that version still does (revision 0035)."""

import pytest
import sqlalchemy as sa

from nightjar.jobs.errors import StoreError
from nightjar.jobs.store import Store
from nightjar.jobs.store.database import database_url as usable_url
from nightjar.jobs.store.database import open_engine, translated_errors
from nightjar.jobs.store.parts import part_of_job
from nightjar.jobs.store.schema import migrate, revert
from tests.jobs import planned
from tests.outcomes import answers, claim

JOB = sa.text(
    "INSERT INTO job (id, state, model, metadata, cancel_requested, total, completed, failed, "
    "cancelled, prompt_tokens, completion_tokens, requested_tokens, saved_tokens, created_at) "
    "VALUES ('old', 'running', 'tiny', '{}', FALSE, 2, 1, 0, 0, 1, 1, 1, 0, now())"
)
MICRO_BATCH = sa.text(
    "INSERT INTO micro_batch (job_id, kind, bucket, size, tokens, state, epoch, attempts, crashes) "
    "VALUES ('old', 'generate', 32, 1, 3, 'done', 0, 1, 0)"
)
APPENDED = sa.text(
    "INSERT INTO request (job_id, row_index, line, kind, body, state) "
    "VALUES (:id, 9, 10, 'generate', '{}', 'queued')"
)
OLD_ROWS = (
    "INSERT INTO request (job_id, row_index, line, custom_id, kind, state, micro_batch_id) "
    "SELECT 'old', 0, 1, 'a', 'generate', 'done', id FROM micro_batch",
    "INSERT INTO request (job_id, row_index, line, custom_id, kind, state) "
    "VALUES ('old', 1, 2, 'b', 'generate', 'queued')",
    """INSERT INTO request_body SELECT id, '{"prompt":"b"}' FROM request WHERE row_index = 1""",
    "INSERT INTO result (request_id, job_id, row_index, status_code, body, prompt_tokens, "
    "completion_tokens, requested_tokens, saved_tokens, created_at) "
    "SELECT id, 'old', 0, 200, '{}', 1, 1, 1, 0, now() FROM request WHERE row_index = 0",
)
FILES_OF_ROWS = "SELECT pg_relation_filenode('%s'), pg_relation_filenode('%s')"


def test_rows_of_before_the_partitions_stay_and_go_on(postgres_url: str) -> None:
    """They become the first partition: nothing of them is written anew, and they are computed."""
    migrate(usable_url(postgres_url), "0034")
    engine = open_engine(usable_url(postgres_url), pool=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(JOB)
        connection.execute(MICRO_BATCH)
        for statement in OLD_ROWS:
            connection.exec_driver_sql(statement)
        files = connection.exec_driver_sql(FILES_OF_ROWS % ("request", "result")).all()
    migrate(usable_url(postgres_url))
    with engine.connect() as connection:
        assert (
            connection.exec_driver_sql(FILES_OF_ROWS % ("request_p0", "result_p0")).all() == files
        )
    engine.dispose()
    opened = Store(postgres_url)
    assert [record.index for record in opened.results.read("old")] == [0]
    (waiting,) = opened.backlog.queued_requests("old", 9)
    assert (waiting.index, waiting.body["prompt"]) == (1, "b")
    job_id, (ref,) = planned(opened, 1)
    assert opened.leases.finish(ref.id, ref.epoch, "worker", answers(claim(opened, ref)))
    assert [record.id >> 40 for record in opened.results.read(job_id)] == [part_of_job(job_id)]
    opened.close()
    with pytest.raises(StoreError, match="ck_request_job"):  # rather than a row that nobody finds
        append_as_before(postgres_url, job_id)


def append_as_before(url: str, job_id: str) -> None:
    """Append a row to a job as a version without partitions does it."""
    engine = open_engine(usable_url(url), pool=sa.NullPool)
    with translated_errors(), engine.begin() as connection:
        connection.execute(APPENDED, {"id": job_id})
    engine.dispose()


def test_partitions_taken_back_leave_all_rows_in_plain_tables(postgres_url: str) -> None:
    opened = Store(postgres_url)
    opened.migrate()
    job_id, (ref,) = planned(opened, 2, each=2)
    assert opened.leases.finish(ref.id, ref.epoch, "worker", answers(claim(opened, ref)))
    opened.close()
    revert(usable_url(postgres_url), "0034")
    engine = open_engine(usable_url(postgres_url), pool=sa.NullPool)
    with engine.connect() as connection:
        kinds = connection.exec_driver_sql(
            "SELECT relname, relkind::text FROM pg_class WHERE relname ~ '^(request|result)' AND "
            "relkind IN ('r', 'p') AND relnamespace = current_schema()::regnamespace ORDER BY 1"
        ).all()
        assert [tuple(row) for row in kinds] == [
            (name, "r") for name in ("request", "request_body", "result")
        ]
        joined = (
            "SELECT count(*) FROM request JOIN result ON request.id = request_id "
            "JOIN request_body USING (request_id) WHERE request.job_id = %s"
        )
        assert connection.exec_driver_sql(joined, (job_id,)).scalar() == 2
        assert sa.inspect(connection).get_foreign_keys("result")
    engine.dispose()

"""A large job that is over, written by the database itself: seconds for a million rows."""

from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa

from nightjar.jobs.store import Store
from nightjar.jobs.store.database import open_engine
from nightjar.jobs.store.landings import pack_ids
from nightjar.jobs.store.partitions import ensure_part
from nightjar.jobs.store.parts import part_of_job
from nightjar.jobs.store.submission import new_parted_job_id
from nightjar.jobs.store.tables import result

EACH = 100
"""Requests of a micro-batch, and of a landing."""

_JOB = """
INSERT INTO job (id, state, model, metadata, cancel_requested, total, completed, failed, cancelled,
  prompt_tokens, completion_tokens, requested_tokens, saved_tokens, landed, planned_to,
  created_at, started_at, finished_at)
VALUES (:job, 'completed', 'tiny', '{}', FALSE, :rows, :rows, 0, 0,
  :rows, :rows, :rows, 0, :rows, :rows, :at, :at, :at)
"""
_MICRO_BATCHES = """
INSERT INTO micro_batch (job_id, kind, bucket, size, tokens, state, epoch, attempts, crashes)
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :parts)
SELECT :job, 'generate', 32, :each, 7 * :each, 'done', 0, 1, 0 FROM n
"""
_FIRST = "SELECT min(id) FROM micro_batch WHERE job_id = :job"
_REQUESTS = """
INSERT INTO request ({id} job_id, row_index, line, custom_id, kind, state, micro_batch_id)
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :rows)
SELECT {next_id} :job, i, i + 1, 'row-' || i, 'generate', 'done', :first + i / :each FROM n
"""
_ID_IN_PART = "(CAST(:part AS bigint) << 40) + nextval('request_id_seq'),"
_BODIES = "INSERT INTO request_body SELECT id, :body FROM request WHERE job_id = :job"
_RESULTS = """
INSERT INTO result (request_id, job_id, row_index, status_code, body, prompt_tokens,
  completion_tokens, requested_tokens, saved_tokens, created_at, landing)
SELECT id, job_id, row_index, 200, :answer, 1, 1, 1, 0, :at, micro_batch_id
FROM request WHERE job_id = :job
"""
_LANDINGS = (
    "INSERT INTO landing (job_id, first, token, request_ids) VALUES (:job, :at, :token, :ids)"
)
_FIRST_REQUEST = "SELECT min(id) FROM request WHERE job_id = :job"


def finished_job(store: Store, rows: int, *, days: float = 0.0, made_days: float = 0.0) -> str:
    """A job of so many small rows that ended so many days ago; returns its id.

    `made_days` ago it was submitted: on PostgreSQL its rows are in the partition of that day.
    """
    job_id = new_parted_job_id(made_days * 86_400)
    names = {"id": "", "next_id": ""}
    if not store.database.is_sqlite:
        names = {"id": "id,", "next_id": _ID_IN_PART}
    moment: object = datetime.now(UTC) - timedelta(days=days)
    if store.database.is_sqlite and isinstance(moment, datetime):
        moment = moment.replace(tzinfo=None).isoformat(sep=" ")
    values: dict[str, Any] = {
        "job": job_id,
        "rows": rows,
        "parts": -(-rows // EACH),
        "part": part_of_job(job_id),
        "each": EACH,
        "at": moment,
        "body": '{"prompt":"the owl hunts at night and sleeps by day","max_tokens":16}',
        "answer": '{"choices":[{"index":0,"text":" in the old barn.","finish_reason":"stop"}]}',
    }
    engine = open_engine(store.database.url, pool=sa.NullPool, limited=False)
    with engine.connect() as connection:
        ensure_part(store.database, connection, job_id)
    with engine.execution_options(nightjar_write=True).begin() as connection:
        for statement in (_JOB, _MICRO_BATCHES):
            connection.execute(sa.text(statement), values)
        values["first"] = connection.scalar(sa.text(_FIRST), values)
        for statement in (_REQUESTS.format(**names), _BODIES, _RESULTS):
            connection.execute(sa.text(statement), values)
        first_id = connection.scalar(sa.text(_FIRST_REQUEST), values)
        landings = [
            {
                "job": job_id,
                "at": at,
                "token": values["first"] + at // EACH,
                "ids": pack_ids(range(first_id + at, first_id + min(rows, at + EACH))),
            }
            for at in range(0, rows, EACH)
        ]
        connection.execute(sa.text(_LANDINGS), landings)
    engine.dispose()
    return job_id


_LENGTHS = """
UPDATE result SET prompt_tokens = 20 + (row_index * 7919) % 900, requested_tokens = 256,
  completion_tokens = 5 + (row_index * 104729) % 90 WHERE job_id = :job
"""
_FAILURES = """
UPDATE result SET status_code = 400, body = NULL, error_code = 'context_exceeded',
  error_message = 'the prompt is too long' WHERE job_id = :job AND row_index % 25 = 0
"""
_AGAIN_READY = """
UPDATE micro_batch SET state = 'ready', bucket = 64
WHERE job_id = :job AND id >= CAST(:first AS BIGINT) + :parts - :open
"""
_NOT_LANDED = "DELETE FROM result WHERE job_id = :job AND row_index >= :landed"
_LANDINGS_LEFT = "DELETE FROM landing WHERE job_id = :job AND first >= :landed"
_RUNS = """
UPDATE job SET state = 'running', finished_at = NULL, completed = :landed - :failed,
  failed = :failed, landed = :landed WHERE id = :job
"""


def running_job(store: Store, rows: int) -> str:
    """A job of so many rows that runs: four fifths have landed, and every 25th of them failed."""
    job_id = finished_job(store, rows, days=0.1)
    parts = -(-rows // EACH)
    landed = (parts - parts // 5) * EACH
    values: dict[str, object] = {
        "job": job_id,
        "parts": parts,
        "open": parts // 5,
        "landed": landed,
        "failed": -(-landed // 25),
    }
    engine = open_engine(store.database.url, pool=sa.NullPool, limited=False)
    with engine.execution_options(nightjar_write=True).begin() as connection:
        values["first"] = connection.scalar(sa.text(_FIRST), values)
        for statement in (
            _NOT_LANDED,
            _LENGTHS,
            _FAILURES,
            _AGAIN_READY,
            _LANDINGS_LEFT,
            _RUNS,
        ):
            connection.execute(sa.text(statement), values)
    engine.dispose()
    return job_id


_MANY = """
INSERT INTO job (id, state, model, metadata, cancel_requested, total, completed, failed, cancelled,
  prompt_tokens, completion_tokens, requested_tokens, saved_tokens, landed,
  created_at, started_at, finished_at)
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :jobs)
SELECT 'job_00' || (100000 + i), CASE i % 10 WHEN 3 THEN 'failed' ELSE 'completed' END, 'tiny',
  '{"run":"nightly-' || i || '"}', FALSE, 5, 5, 0, 0, 5, 5, 5, 0, 5, :at, :at, :at FROM n
"""


def old_jobs(store: Store, jobs: int) -> None:
    """So many small jobs that ended long ago, without their rows."""
    moment: object = datetime.now(UTC) - timedelta(days=3)
    if store.database.is_sqlite and isinstance(moment, datetime):
        moment = moment.replace(tzinfo=None).isoformat(sep=" ")
    store.database.write(
        lambda connection: connection.execute(sa.text(_MANY), {"jobs": jobs, "at": moment})
    )


_LATER = """
INSERT INTO micro_batch (job_id, kind, bucket, size, tokens, state, epoch, attempts, crashes)
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :parts)
SELECT 'job_00' || (100000 + i % 1000), 'generate', 32, 5, 35, 'done', 0, 1, 0 FROM n
"""


def later_micro_batches(store: Store, parts: int) -> None:
    """So many micro-batches of `old_jobs`, with higher ids than all before."""
    store.database.write(lambda connection: connection.execute(sa.text(_LATER), {"parts": parts}))


def results_kept(store: Store, job_id: str) -> int:
    """How many results of a job the database holds, whether or not anyone may read them."""
    count = sa.select(sa.func.count()).select_from(result).where(result.c.job_id == job_id)
    with store.database.reading() as connection:
        return connection.scalar(count) or 0

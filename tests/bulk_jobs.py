"""A large job that is over, written by the database itself: seconds for a million rows."""

from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from nightjar.jobs.store import Store
from nightjar.jobs.store.database import open_engine
from nightjar.jobs.store.submission import new_job_id
from nightjar.jobs.store.tables import result

EACH = 100
"""Requests of a micro-batch, and of a landing."""

_JOB = """
INSERT INTO job (id, state, model, metadata, cancel_requested, total, completed, failed, cancelled,
  prompt_tokens, completion_tokens, requested_tokens, saved_tokens, landed,
  created_at, started_at, finished_at)
VALUES (:job, 'completed', 'tiny', '{}', FALSE, :rows, :rows, 0, 0,
  :rows, :rows, :rows, 0, :rows, :at, :at, :at)
"""
_MICRO_BATCHES = """
INSERT INTO micro_batch (job_id, kind, bucket, size, tokens, state, epoch, attempts, crashes)
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :parts)
SELECT :job, 'generate', 32, :each, 7 * :each, 'done', 0, 1, 0 FROM n
"""
_FIRST = "SELECT min(id) FROM micro_batch WHERE job_id = :job"
_REQUESTS = """
INSERT INTO request (job_id, row_index, line, custom_id, kind, body, state, micro_batch_id,
  segments)
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :rows)
SELECT :job, i, i + 1, 'row-' || i, 'generate', :body, 'done', :first + i / :each, :segments FROM n
"""
_RESULTS = """
INSERT INTO result (request_id, job_id, row_index, status_code, body, prompt_tokens,
  completion_tokens, requested_tokens, saved_tokens, created_at, landing)
SELECT id, job_id, row_index, 200, :answer, 1, 1, 1, 0, :at, micro_batch_id
FROM request WHERE job_id = :job
"""
_LANDINGS = """
INSERT INTO landing (job_id, first, token, request_ids)
WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :parts)
SELECT :job, i * :each, :first + i, :ids FROM n
"""


def finished_job(store: Store, rows: int, *, days: float = 0.0) -> str:
    """A job of so many small rows that ended so many days ago; returns its id."""
    job_id = new_job_id()
    moment: object = datetime.now(UTC) - timedelta(days=days)
    if store.database.is_sqlite and isinstance(moment, datetime):
        moment = moment.replace(tzinfo=None).isoformat(sep=" ")
    values = {
        "job": job_id,
        "rows": rows,
        "parts": -(-rows // EACH),
        "each": EACH,
        "at": moment,
        "body": '{"prompt":"the owl hunts at night and sleeps by day","max_tokens":16}',
        "answer": '{"choices":[{"index":0,"text":" in the old barn.","finish_reason":"stop"}]}',
        "segments": bytes(48),
        "ids": bytes(8 * EACH),
    }
    engine = open_engine(store.database.url, pool=sa.NullPool, limited=False)
    with engine.execution_options(nightjar_write=True).begin() as connection:
        for statement in (_JOB, _MICRO_BATCHES):
            connection.execute(sa.text(statement), values)
        values["first"] = connection.scalar(sa.text(_FIRST), values)
        for statement in (_REQUESTS, _RESULTS, _LANDINGS):
            connection.execute(sa.text(statement), values)
    engine.dispose()
    return job_id


def results_kept(store: Store, job_id: str) -> int:
    """How many results of a job the database holds, whether or not anyone may read them."""
    count = sa.select(sa.func.count()).select_from(result).where(result.c.job_id == job_id)
    with store.database.reading() as connection:
        return connection.scalar(count) or 0

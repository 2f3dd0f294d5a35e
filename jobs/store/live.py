"""Single calls: jobs of one row, each with a client that waits for its answer.

A call is stored like a job, so that planning, leases and outcomes are the same. It takes no staging
table, because one row needs none. Nothing of it is durable before its answer: a power cut also ends
the connection of the client that waits.
"""

import math
import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.equality import with_own_content_key
from nightjar.jobs.records import (
    CallOutcome,
    JsonObject,
    MicroBatchRef,
    NewJob,
    PlannedCall,
    RequestError,
)
from nightjar.jobs.states import MicroBatchState, RequestKind, RequestState
from nightjar.jobs.store.account_tables import tenant
from nightjar.jobs.store.bodies import dump_body
from nightjar.jobs.store.body_rows import delete_bodies_alone
from nightjar.jobs.store.common import AnyRow, now, today
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.json_text import load_json
from nightjar.jobs.store.newest_rows import newest_rows
from nightjar.jobs.store.parts import in_parts_of
from nightjar.jobs.store.quotas import Quotas
from nightjar.jobs.store.submission import id_before, job_values
from nightjar.jobs.store.tables import (
    LIVE,
    job,
    landing,
    micro_batch,
    micro_batch_tokens,
    request,
    request_body,
    result,
)
from nightjar.jobs.store.token_ids import pack_asked, pack_token_ids
from nightjar.jobs.store.turns import Turns

PURGED_PER_STEP = 200
# Calls go before every job: as if they had waited for so long.
_AHEAD = timedelta(days=36_500)
# Built once, as each call uses them: building costs more than running.
_INSERT_JOB = sa.insert(job)
_INSERT_MICRO_BATCH = sa.insert(micro_batch).returning(micro_batch.c.id)
_INSERT_REQUEST = sa.insert(request).returning(request.c.id)
_INSERT_BODY = sa.insert(request_body)
_INSERT_TOKENS = sa.insert(micro_batch_tokens)
_ENDED = sa.select(
    result.c.job_id,
    result.c.status_code,
    result.c.body,
    result.c.error_code,
    result.c.error_message,
    result.c.error_param,
    result.c.reused,
).where(
    result.c.job_id.in_(sa.bindparam("jobs", expanding=True)),
    in_parts_of(result.c.request_id, [0]),
)
# The tokens of a tenant with a daily quota are counted by its jobs: those of today stay.
_counts_today = sa.exists().where(
    tenant.c.name == job.c.tenant,
    tenant.c.tokens_a_day.is_not(None),
    job.c.tokens_day == sa.bindparam("today"),
)
_OLD = (
    sa.select(job.c.id)
    .where(LIVE, job.c.id < sa.bindparam("before"), job.c.finished_at.is_not(None), ~_counts_today)
    .order_by(job.c.id)
    .limit(PURGED_PER_STEP)
)


class LiveCalls:
    """Submits single calls, reads their answers, and deletes old ones."""

    def __init__(self, database: Database, quotas: Quotas) -> None:
        self._database = database
        self._quotas = quotas

    def submit(
        self,
        new_job: NewJob,
        job_id: str,
        kind: RequestKind,
        body: JsonObject,
        planned: PlannedCall | None = None,
    ) -> MicroBatchRef | None:
        """Store a call, in one transaction; `job_id` is new (`submission.new_job_id`).

        With `planned` the call is a micro-batch at once, in the state dispatched: the caller
        publishes the returned message. Without it the planner plans the call like any row.
        """
        job_row = job_values(new_job, job_id, total=1)
        job_row |= {"live": True, "rank_at": job_row["created_at"] - _AHEAD}
        job_row["planned_to"] = 0 if planned is None else 1
        asked = dump_body(with_own_content_key(body, new_job.tenant))
        needed = None if planned is None else pack_asked([planned.encoded])
        row: dict[str, Any] = {
            "job_id": job_id,
            "row_index": 0,
            "line": 1,
            "custom_id": job_id,
            "kind": kind,
            "state": RequestState.QUEUED,
            "micro_batch_id": None,
            "prompt_vector": None,
            "adapter": None,
        }

        def work(connection: Connection) -> MicroBatchRef | None:
            self._quotas.check_new_job(connection, new_job.tenant, 1)
            connection.execute(_INSERT_JOB, job_row)
            ref = None
            if planned is not None:
                ref = _insert_micro_batch(connection, job_id, planned)
                row.update(
                    state=RequestState.PLANNED,
                    micro_batch_id=ref.id,
                    prompt_vector=planned.encoded.prompt_vector,
                    adapter=planned.encoded.adapter,
                )
            request_id = connection.execute(_INSERT_REQUEST, row).scalar_one()
            connection.execute(_INSERT_BODY, {"request_id": request_id, "body": asked})
            if planned is not None and ref is not None:
                packed = pack_token_ids({request_id: planned.encoded.segments})
                tokens = {"micro_batch_id": ref.id, "token_ids": packed, "asked": needed}
                connection.execute(_INSERT_TOKENS, tokens)
            return ref

        return self._database.write(work, live=True)

    def ended(self, job_ids: Collection[str]) -> list[CallOutcome]:
        """The outcomes of those of the calls that have ended."""
        if not job_ids:
            return []
        with self._database.reading() as connection:
            rows = connection.execute(_ENDED, {"jobs": list(job_ids)}).all()
        return [_outcome(row) for row in rows]

    def purge(self, keep_s: float, patience_s: float = math.inf) -> int:
        """Delete calls that are over and are older than `keep_s` seconds; returns how many.

        No step begins after `patience_s` seconds; the next call goes on with the rest.
        """
        deadline = time.monotonic() + patience_s
        before = id_before(keep_s)
        turns = Turns(self._database)
        purged = 0
        while ids := self._old(before):
            self._database.write(partial(_delete, ids=ids), durable=False)
            purged += len(ids)
            if len(ids) < PURGED_PER_STEP // 2 or time.monotonic() >= deadline:
                break
            turns.give()
        return purged

    def _old(self, before: str) -> list[str]:
        """Some calls to delete: not those that hold the newest request or micro-batch."""
        with self._database.reading() as connection:
            old = list(connection.scalars(_OLD, {"before": before, "today": today()}))
            if not old:
                return []
            newest = newest_rows(connection).job_ids
        return [job_id for job_id in old if job_id not in newest]


def _insert_micro_batch(connection: Connection, job_id: str, planned: PlannedCall) -> MicroBatchRef:
    item = planned.micro_batch
    values = {
        "job_id": job_id,
        "kind": item.kind,
        "bucket": item.bucket,
        "size": 1,
        "tokens": item.tokens,
        "state": MicroBatchState.DISPATCHED,
        "epoch": 0,
        "attempts": 0,
        "crashes": 0,
        "fingerprint": planned.fingerprint,
        "live": True,
        "planned_at": now(),
    }
    id_: int = connection.execute(_INSERT_MICRO_BATCH, values).scalar_one()
    return MicroBatchRef(
        id_,
        0,
        job_id,
        item.kind,
        item.bucket,
        size=1,
        tokens=item.tokens,
        fingerprint=planned.fingerprint,
        live=True,
    )


def _delete(connection: Connection, ids: Sequence[str]) -> None:
    """Delete calls, in the order in which their rows refer to each other."""
    answers = (result.c.job_id.in_(ids), in_parts_of(result.c.request_id, [0]))
    connection.execute(sa.delete(result).where(*answers))
    of_calls = (request.c.job_id.in_(ids), in_parts_of(request.c.id, [0]))
    ids_of = sa.select(request.c.id).where(*of_calls)
    delete_bodies_alone(connection, connection.scalars(ids_of).all())
    connection.execute(sa.delete(request).where(*of_calls))
    connection.execute(sa.delete(micro_batch).where(micro_batch.c.job_id.in_(ids)))
    connection.execute(sa.delete(landing).where(landing.c.job_id.in_(ids)))
    connection.execute(sa.delete(job).where(job.c.id.in_(ids)))


def _outcome(row: AnyRow) -> CallOutcome:
    error = None
    if row.error_code is not None:
        error = RequestError(row.error_code, row.error_message, row.error_param)
    body = None if row.body is None else load_json(row.body)
    if body is not None and row.reused is not None:
        body["reused"] = row.reused.value
    return CallOutcome(row.job_id, row.status_code, body, error)

"""Ready micro-batches of one model, of the job of the first rank first.

They are read job by job, so that no backlog has to be sorted.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs import lifecycle
from nightjar.jobs.records import MicroBatchRef
from nightjar.jobs.store.common import REF_COLUMNS, has_rows
from nightjar.jobs.store.precedence import RANK
from nightjar.jobs.store.tables import READY_ALONE, READY_SUSPECTS, job, micro_batch

_mb = micro_batch.c
# Built once, as each tick uses them: building costs more than running.
# Repeats the condition of the partial index, so that the database uses that index.
_IS_READY_FOR = sa.and_(_mb.fingerprint == sa.bindparam("of_model"), READY_ALONE)
# Whether a job has ready micro-batches of the model.
HAS_READY = has_rows(_mb.id, _mb.job_id == job.c.id, _IS_READY_FOR)
# The next model that has ready micro-batches: a step in the index for each, however many wait.
_NEXT_MODEL = (
    sa.select(_mb.fingerprint)
    .where(_mb.fingerprint > sa.bindparam("after"), READY_ALONE)
    .order_by(_mb.fingerprint)
    .limit(1)
)
_OF_NO_MODEL = sa.select(sa.literal(1)).where(_mb.fingerprint == "", READY_ALONE).limit(1)
_most = sa.bindparam("most", type_=sa.Integer)
_of_tenant = job.c.tenant == sa.bindparam("of_tenant")
_ALL_JOBS = sa.select(job.c.id, job.c.priority).where(
    job.c.state.in_(lifecycle.RUNNABLE), ~job.c.live, HAS_READY
)
_RUNNABLE = _ALL_JOBS.order_by(*RANK).limit(_most)
_RUNNABLE_OF_TENANT = _ALL_JOBS.where(_of_tenant).order_by(*RANK).limit(_most)
_READY = (
    sa.select(*REF_COLUMNS)
    .where(
        _IS_READY_FOR,
        _mb.job_id == sa.bindparam("of_job"),
        _mb.id > sa.bindparam("behind"),
        ~_mb.isolated,
    )
    .order_by(_mb.job_id, _mb.id)
    .limit(_most)
)
_of_suspect = (
    sa.select(*REF_COLUMNS)
    .where(_mb.fingerprint == sa.bindparam("of_model"), READY_SUSPECTS)
    .subquery()
)
_ALL_SUSPECTS = (
    sa.select(job.c.priority, *_of_suspect.c)
    .join(job, job.c.id == _of_suspect.c.job_id)
    .where(job.c.state.in_(lifecycle.RUNNABLE))
)
_SUSPECTS = _ALL_SUSPECTS.order_by(*RANK, _of_suspect.c.id).limit(_most)
_SUSPECTS_OF_TENANT = _ALL_SUSPECTS.where(_of_tenant).order_by(*RANK, _of_suspect.c.id).limit(_most)


def models_with_ready(connection: Connection) -> list[str]:
    """The fingerprints of the models that ready micro-batches were planned for."""
    found = [""] if connection.scalar(_OF_NO_MODEL) else []
    after = ""
    while following := connection.scalar(_NEXT_MODEL, {"after": after}):
        found.append(following)
        after = following
    return found


def in_rank_order(
    connection: Connection,
    fingerprint: str,
    most: int,
    *,
    tenant: str | None = None,
    page: int | None = None,
) -> Iterator[MicroBatchRef]:
    """Ready micro-batches of a model, at most `most`; of one tenant alone if it is given.

    Suspects come before the others, but not before those of a job that has a priority. They were
    dispatched once already, and their ids are the highest: by id they would wait for the whole
    backlog of their job.

    `page` is how many micro-batches the first statement of a job reads, `most` by default; each
    further statement reads twice as many. It suits callers that take only a few.
    """
    values: dict[str, Any] = {"of_model": fingerprint, "most": most}
    suspected, runnable = _SUSPECTS, _RUNNABLE
    if tenant is not None:
        values["of_tenant"] = tenant
        suspected, runnable = _SUSPECTS_OF_TENANT, _RUNNABLE_OF_TENANT
    suspects: dict[bool, list[MicroBatchRef]] = {True: [], False: []}
    for priority, *columns in connection.execute(suspected, values).all():
        urgent = priority > 0
        suspects[urgent].append(replace(MicroBatchRef(*columns), urgent=urgent))
    first = suspects.pop(True)
    yield from first
    left = most - len(first)
    for job_id, priority in connection.execute(runnable, values).all():
        urgent = priority > 0
        if not urgent:
            waiting = suspects.pop(False, [])[:left]
            yield from waiting
            left -= len(waiting)
        if left <= 0:
            return
        for ref in _of_job(connection, fingerprint, job_id, left, page or left):
            yield replace(ref, urgent=urgent)
            left -= 1


def _of_job(
    connection: Connection, fingerprint: str, job_id: str, most: int, page: int
) -> Iterator[MicroBatchRef]:
    values: dict[str, Any] = {"of_model": fingerprint, "of_job": job_id, "behind": 0}
    while most > 0:
        values["most"] = min(page, most)
        rows = connection.execute(_READY, values).all()
        for row in rows:
            yield MicroBatchRef(*row)
        if len(rows) < values["most"]:
            return
        most -= len(rows)
        page *= 2
        values["behind"] = rows[-1].id

"""The steps of storing a plan: lock its requests, insert its micro-batches, join the two."""

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.records import EncodedRequest, MicroBatchRef, NewMicroBatch
from nightjar.jobs.states import MicroBatchState, RequestState
from nightjar.jobs.store.common import now
from nightjar.jobs.store.parts import InPartOf
from nightjar.jobs.store.tables import job, micro_batch, request

MEMBERSHIP = ("state", "micro_batch_id", "prompt_vector", "adapter")
_INSERT = sa.insert(micro_batch).returning(micro_batch.c.id, sort_by_parameter_order=True)


def lock_queued(connection: Connection, job_id: str, ids: Sequence[int]) -> dict[int, int]:
    """Lock those requests that are still queued; gives their row indexes by id."""
    open_job = sa.exists().where(job.c.id == job_id, ~job.c.cancel_requested)
    statement = (
        sa.select(request.c.id, request.c.row_index)
        .where(
            # By ids alone: PostgreSQL without statistics reads the whole job by its index.
            sa.func.coalesce(request.c.job_id, "") == job_id,
            request.c.id.between(min(ids), max(ids)),
            InPartOf(request.c.id, job_id),
            request.c.state == RequestState.QUEUED,
            open_job,
        )
        .order_by(request.c.id)
        .with_for_update(of=request)
    )
    wanted = set(ids)
    return {id_: index for id_, index in connection.execute(statement).all() if id_ in wanted}


def insert_micro_batches(
    connection: Connection,
    job_id: str,
    items: Sequence[NewMicroBatch],
    fingerprint: str,
    *,
    live: bool,
) -> list[MicroBatchRef]:
    """Insert ready micro-batches; gives them in the order of `items`."""
    if not items:
        return []
    moment = now()
    rows = [
        {
            "job_id": job_id,
            "kind": item.kind,
            "bucket": item.bucket,
            "size": len(item.request_ids),
            "tokens": item.tokens,
            "state": MicroBatchState.READY,
            "epoch": 0,
            "attempts": 0,
            "crashes": 0,
            "fingerprint": fingerprint,
            "live": live,
            "planned_at": moment,
        }
        for item in items
    ]
    ids = connection.scalars(_INSERT, rows).all()
    return [
        MicroBatchRef(
            id_,
            0,
            job_id,
            item.kind,
            item.bucket,
            len(item.request_ids),
            item.tokens,
            fingerprint=fingerprint,
            live=live,
        )
        for id_, item in zip(ids, items, strict=True)
    ]


def members(
    refs: Sequence[MicroBatchRef],
    stored: Sequence[NewMicroBatch],
    encoded: Mapping[int, EncodedRequest],
) -> list[tuple[Any, ...]]:
    """The values of MEMBERSHIP, then the id, of each request that joins a micro-batch."""
    planned = RequestState.PLANNED.value
    return [
        (planned, ref.id, encoded[id_].prompt_vector, encoded[id_].adapter, id_)
        for ref, item in zip(refs, stored, strict=True)
        for id_ in item.request_ids
    ]

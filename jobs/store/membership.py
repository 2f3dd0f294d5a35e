"""Which requests are in a micro-batch: those whose token ids it has.

A plan lists them there, so that no index from micro-batches to requests is written for each row.
"""

from collections.abc import Collection, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.records import MicroBatchRef
from nightjar.jobs.states import RequestState
from nightjar.jobs.store.common import AnyRow
from nightjar.jobs.store.listed import IsListed, ids
from nightjar.jobs.store.parts import InPartOf
from nightjar.jobs.store.tables import micro_batch, micro_batch_tokens, request
from nightjar.jobs.store.token_ids import bytes_of_list, unpack_ids

_of_job = sa.bindparam("of_job", type_=sa.Text)
_is_open = (
    request.c.micro_batch_id == sa.bindparam("micro_batch"),
    request.c.state == RequestState.PLANNED,
    InPartOf(request.c.id, _of_job),
)
MEMBERS = sa.and_(IsListed(request.c.id, ids("members")), *_is_open)
"""A condition on requests, with the parameters `members`, `micro_batch` and `of_job`."""

_FOUND = sa.select(request.c.id, request.c.row_index).where(MEMBERS).order_by(request.c.id)
# Of a planner of two versions before, which lists no members.
_UNLISTED = (
    sa.select(request.c.id, request.c.row_index)
    .where(request.c.job_id == _of_job, *_is_open)
    .order_by(request.c.id)
)
_LISTS = (
    sa.select(
        micro_batch.c.id,
        micro_batch.c.job_id,
        # The beginning alone: the token ids behind it are a hundred times as much.
        sa.func.substr(micro_batch_tokens.c.token_ids, 1, bytes_of_list(micro_batch.c.size)),
    )
    .join(micro_batch_tokens, micro_batch_tokens.c.micro_batch_id == micro_batch.c.id, isouter=True)
    .where(micro_batch.c.id.in_(sa.bindparam("micro_batches", expanding=True)))
    .order_by(micro_batch.c.id)
)


def unfinished(
    connection: Connection, held: AnyRow | MicroBatchRef, given: Collection[int] = ()
) -> dict[int, int]:
    """The row index of each open request of a micro-batch, by the request's id.

    `held` has the columns `id`, `job_id` and `size` of the micro-batch. `given` are requests that
    are probably all of its members: then its list is not read.
    """
    key = {"micro_batch": held.id, "of_job": held.job_id}
    if len(given) >= held.size:
        found = dict(connection.execute(_FOUND, key | {"members": given}).all())
        if len(found) == held.size:
            return found
    return open_members(connection, [held.id])


def open_members(connection: Connection, micro_batches: Sequence[int]) -> dict[int, int]:
    """The same of several micro-batches."""
    found: dict[int, int] = {}
    for id_, job_id, packed in connection.execute(_LISTS, {"micro_batches": micro_batches}).all():
        key = {"micro_batch": id_, "of_job": job_id}
        if packed is None:
            found |= dict(connection.execute(_UNLISTED, key).all())
        else:
            found |= dict(connection.execute(_FOUND, key | {"members": unpack_ids(packed)}).all())
    return found

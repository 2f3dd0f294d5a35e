"""Replanning: plans for models that are not served any more are taken apart.

Token ids have a meaning for one tokenizer only. So the requests are queued again, to be encoded for
the models that are served now.
"""

import sys
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs import lifecycle
from nightjar.jobs.records import MicroBatchRef
from nightjar.jobs.states import MicroBatchState, RequestState
from nightjar.jobs.store.awaiting import lower_planned_to
from nightjar.jobs.store.common import REF_COLUMNS, now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.listed import IsListed, listed_ids
from nightjar.jobs.store.membership import unfinished
from nightjar.jobs.store.parts import in_parts_of
from nightjar.jobs.store.tables import READY_ALONE, micro_batch, request
from nightjar.jobs.store.token_ids import drop_token_ids

_mb = micro_batch.c
_WAITING = (MicroBatchState.READY, MicroBatchState.DISPATCHED)
_ABOVE = _mb.fingerprint > sa.bindparam("above")
_BELOW = _mb.fingerprint < sa.bindparam("below")
# Separate statements, so that each is a step in an index: what lies before the first served
# model, behind the last one, and between two. What is dispatched is never much.
_READY_BEFORE, _READY_BEHIND, _READY_BETWEEN = (
    sa.select(_mb.id).where(READY_ALONE, *where).limit(sa.bindparam("most"))
    for where in ((_BELOW,), (_ABOVE,), (_ABOVE, _BELOW))
)
_OTHERS_DISPATCHED = (
    sa.select(_mb.id)
    .where(
        _mb.state == MicroBatchState.DISPATCHED,
        _mb.fingerprint.not_in(sa.bindparam("served", expanding=True)),
    )
    .limit(sa.bindparam("most"))
)
_LOCKED = (
    sa.select(*REF_COLUMNS)
    .where(_mb.id.in_(sa.bindparam("ids", expanding=True)), _mb.state.in_(_WAITING))
    .order_by(_mb.id)
    .with_for_update()
)


class Replanning:
    """Takes plans apart when the planner serves other models than before."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def take_apart_others(
        self, served: Collection[str], most: int, *, unnamed_alone: bool = False
    ) -> list[MicroBatchRef]:
        """Take apart micro-batches of other models, and queue their requests again.

        Takes at most `most` micro-batches, in one transaction, and none that is leased: its worker
        finishes it. Returns those that were taken apart; none when none are left. `served` are the
        fingerprints of the models that are planned for now, at least one. `unnamed_alone` takes
        only micro-batches whose planner, of an older version, did not name the model.
        """
        with self._database.reading() as connection:  # most calls find none, and need no lock
            ids = _waiting_for_others(connection, served, most, unnamed_alone=unnamed_alone)
        if not ids:
            return []
        for source in _WAITING:
            lifecycle.check_step(
                lifecycle.MICRO_BATCH_TRANSITIONS, source, MicroBatchState.REPLANNED
            )

        def work(connection: Connection) -> list[MicroBatchRef]:
            refs = [MicroBatchRef(*row) for row in connection.execute(_LOCKED, {"ids": ids})]
            _take_apart(connection, refs)
            return refs

        return self._database.write(work)


def _waiting_for_others(
    connection: Connection, served: Collection[str], most: int, *, unnamed_alone: bool
) -> list[int]:
    ids: list[int] = []
    for statement, values in _looks(sorted(served)):
        chosen = statement.where(_mb.fingerprint == "") if unnamed_alone else statement
        ids += connection.scalars(chosen, {**values, "most": most - len(ids)})
    return ids


def _looks(served: list[str]) -> Iterator[tuple[sa.Select[int], dict[str, object]]]:
    """Yield the statements that find micro-batches of models beside the served ones."""
    yield _READY_BEFORE, {"below": served[0]}
    yield _READY_BEHIND, {"above": served[-1]}
    for one, following in pairwise(served):
        yield _READY_BETWEEN, {"above": one, "below": following}
    yield _OTHERS_DISPATCHED, {"served": served}


def _take_apart(connection: Connection, refs: Sequence[MicroBatchRef]) -> None:
    lifecycle.check_step(lifecycle.REQUEST_TRANSITIONS, RequestState.PLANNED, RequestState.QUEUED)
    taken = [ref.id for ref in refs]
    members: dict[int, int] = {}
    first: dict[str, int] = {}  # the lowest row of each job
    for ref in refs:
        own = unfinished(connection, ref)
        members |= own
        first[ref.job_id] = min([*own.values(), first.get(ref.job_id, sys.maxsize)])
    ended = sa.update(micro_batch).where(_mb.id.in_(taken))
    connection.execute(ended.values(state=MicroBatchState.REPLANNED, ended_at=now()))
    drop_token_ids(connection, *taken)
    again = sa.update(request).where(
        IsListed(request.c.id, listed_ids(members)), in_parts_of(request.c.id, members)
    )
    connection.execute(again.values(state=RequestState.QUEUED, micro_batch_id=None))
    for job_id in sorted(first):
        lower_planned_to(connection, job_id, first[job_id])

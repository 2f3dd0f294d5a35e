"""Replanning: plans for a model that is not served any more are taken apart.

Token ids have a meaning for one tokenizer only. So the requests are queued again, to be encoded for
the model that is served now.
"""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs import lifecycle
from nightjar.jobs.records import MicroBatchRef
from nightjar.jobs.states import MicroBatchState, RequestState
from nightjar.jobs.store.common import REF_COLUMNS
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.tables import READY_ALONE, micro_batch, request

_mb = micro_batch.c
_WAITING = (MicroBatchState.READY, MicroBatchState.DISPATCHED)
_OTHER = _mb.fingerprint != sa.bindparam("served")
# Separate statements, so that each is a step in an index. What is dispatched is never much.
_OTHERS_READY = tuple(
    sa.select(_mb.id).where(READY_ALONE, other).limit(sa.bindparam("most"))
    for other in (
        _mb.fingerprint < sa.bindparam("served"),
        _mb.fingerprint > sa.bindparam("served"),
    )
)
_OTHERS_DISPATCHED = (
    sa.select(_mb.id)
    .where(_mb.state == MicroBatchState.DISPATCHED, _OTHER)
    .limit(sa.bindparam("most"))
)
_LOCKED = (
    sa.select(*REF_COLUMNS)
    .where(_mb.id.in_(sa.bindparam("ids", expanding=True)), _mb.state.in_(_WAITING))
    .order_by(_mb.id)
    .with_for_update()
)


class Replanning:
    """Takes plans apart when the planner serves another model than before."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def take_apart_others(
        self, served: str, most: int, *, unnamed_alone: bool = False
    ) -> list[MicroBatchRef]:
        """Take apart micro-batches of other models, and queue their requests again.

        Takes at most `most` micro-batches, in one transaction, and none that is leased: its worker
        finishes it. Returns those that were taken apart; none when none are left. `served` is the
        fingerprint of the model that is planned for now. `unnamed_alone` takes only micro-batches
        whose planner, of an older version, did not name the model.
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
            taken = [ref.id for ref in refs]
            _take_apart(connection, taken)
            return refs

        return self._database.write(work)


def _waiting_for_others(
    connection: Connection, served: str, most: int, *, unnamed_alone: bool
) -> list[int]:
    ids: list[int] = []
    for statement in (*_OTHERS_READY, _OTHERS_DISPATCHED):
        chosen = statement.where(_mb.fingerprint == "") if unnamed_alone else statement
        ids += connection.scalars(chosen, {"served": served, "most": most - len(ids)})
    return ids


def _take_apart(connection: Connection, micro_batches: list[int]) -> None:
    lifecycle.check_step(lifecycle.REQUEST_TRANSITIONS, RequestState.PLANNED, RequestState.QUEUED)
    connection.execute(
        sa.update(micro_batch)
        .where(_mb.id.in_(micro_batches))
        .values(state=MicroBatchState.REPLANNED)
    )
    # The old token ids stay until the planner overwrites them.
    connection.execute(
        sa.update(request)
        .where(request.c.micro_batch_id.in_(micro_batches), request.c.state == RequestState.PLANNED)
        .values(state=RequestState.QUEUED, micro_batch_id=None)
    )

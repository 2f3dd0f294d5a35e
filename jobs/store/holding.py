"""Leases that a transaction holds: it may give them back or end them."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs import lifecycle
from nightjar.jobs.errors import StoreError
from nightjar.jobs.records import NewResult
from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.store.common import AnyRow, now
from nightjar.jobs.store.membership import unfinished
from nightjar.jobs.store.outcomes import Outcomes
from nightjar.jobs.store.stop_reasons import find_stop, stopped_result
from nightjar.jobs.store.tables import IS_LEASED, micro_batch
from nightjar.jobs.store.token_ids import drop_token_ids
from nightjar.jobs.tallies import ComputeCost, dump_tally, tally_of

CRASHED_CODE = "compute_lost"
"""The error of a request that crashed alone; if it is tried again, then with its token ids."""

# Built once, as each micro-batch uses them: building costs more than running.
_mb = micro_batch.c
_IS_HELD = sa.and_(
    _mb.id == sa.bindparam("held"),
    _mb.epoch == sa.bindparam("at_epoch"),
    _mb.owner == sa.bindparam("by"),
    _mb.state == MicroBatchState.LEASED,
)
_HOLD = sa.select(*_mb).where(_IS_HELD).with_for_update()
_HOLD_ALL = (
    sa.select(*_mb)
    .where(_mb.owner == sa.bindparam("by"), IS_LEASED)
    .order_by(_mb.id)
    .with_for_update()
)
_more = sa.func.nullif(
    sa.func.coalesce(_mb.uncharged, 0) + sa.bindparam("computed", type_=sa.BigInteger), 0
)
_TO_LAST_STATE = sa.update(micro_batch).values(
    state=sa.bindparam("outcome"),
    owner=None,
    uncharged=_more,
    ended_at=sa.bindparam("at", type_=_mb.ended_at.type),
    tally=sa.bindparam("counted", type_=sa.Text),
)
_CLOSE = _TO_LAST_STATE.where(_mb.id == sa.bindparam("closed"))
_CLOSE_IF_HELD = _TO_LAST_STATE.where(_IS_HELD).returning(_mb.id, _mb.job_id, _mb.size)
_OCCUPIED = sa.update(micro_batch).where(_mb.id == sa.bindparam("closed")).values(uncharged=_more)


class HeldLeases:
    """Gives back or ends the leases that a transaction holds."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes

    def release(
        self, connection: Connection, leased: AnyRow, counted: sa.Column[int] | None = None
    ) -> None:
        """Make a held micro-batch ready again, under the next epoch.

        `counted` is a column of the micro-batch that rises by one. The micro-batch of a stopped job
        ends as cancelled instead.
        """
        if find_stop(connection, leased.job_id):
            self.end(connection, leased, (), MicroBatchState.CANCELLED)
            return
        lifecycle.check_step(
            lifecycle.MICRO_BATCH_TRANSITIONS, MicroBatchState.LEASED, MicroBatchState.READY
        )
        values = {"state": MicroBatchState.READY, "epoch": _mb.epoch + 1, "owner": None}
        if counted is not None:
            values[counted.name] = counted + 1
        connection.execute(sa.update(micro_batch).where(_mb.id == leased.id).values(values))

    def end(
        self,
        connection: Connection,
        held: AnyRow,
        results: Sequence[NewResult],
        state: MicroBatchState,
        cost: ComputeCost | None = None,
    ) -> None:
        """Close a held micro-batch with an outcome for each request.

        Requests of a stopped job may lack their result and end as stopped. Raises StoreError for a
        missing or a foreign result.
        """
        close(connection, held.id, state, results, cost)
        self._land(connection, held, results)

    def finish(
        self,
        connection: Connection,
        micro_batch_id: int,
        epoch: int,
        owner: str,
        results: Sequence[NewResult],
        cost: ComputeCost | None,
    ) -> bool:
        """Hold a micro-batch and end it as done, in fewer statements; False if it is not held."""
        key = {"held": micro_batch_id, "at_epoch": epoch, "by": owner}
        values = key | _last_values(MicroBatchState.DONE, results, cost)
        held = connection.execute(_CLOSE_IF_HELD, values).one_or_none()
        if held is None:
            return False
        self._land(connection, held, results)
        return True

    def _land(self, connection: Connection, held: AnyRow, results: Sequence[NewResult]) -> None:
        given = {item.request_id for item in results}
        indexes = unfinished(connection, held, given)
        missing = indexes.keys() - given
        check_members(held.id, given, indexes.keys())
        stopped: list[NewResult] = []
        if missing:
            reason = find_stop(connection, held.job_id)
            if reason is None:
                raise StoreError(f"micro-batch {held.id} lacks results for {sorted(missing)[:5]}")
            stopped = [stopped_result(id_, reason) for id_ in sorted(missing)]
        if not any(item.error is not None and item.error.code == CRASHED_CODE for item in results):
            drop_token_ids(connection, held.id)
        self._outcomes.land(connection, held.job_id, [*results, *stopped], indexes)


def close(
    connection: Connection,
    micro_batch_id: int,
    state: MicroBatchState,
    results: Sequence[NewResult],
    cost: ComputeCost | None = None,
) -> None:
    """Take a held micro-batch to its last state, and note the tokens and the tally of its results.

    `Shares.settle` charges them to the tenant. They are noted in this transaction, so they are
    charged once, and nothing is charged for results that are thrown away.
    """
    values = {"closed": micro_batch_id} | _last_values(state, results, cost)
    connection.execute(_CLOSE, values)


def _last_values(
    state: MicroBatchState, results: Sequence[NewResult], cost: ComputeCost | None
) -> dict[str, object]:
    lifecycle.check_step(lifecycle.MICRO_BATCH_TRANSITIONS, MicroBatchState.LEASED, state)
    computed = sum(
        item.prompt_tokens + item.completion_tokens for item in results if item.reused is None
    )
    return {
        "outcome": state,
        "computed": computed,
        "at": now(),
        "counted": dump_tally(tally_of(results, cost)),
    }


def note_occupied(connection: Connection, held: AnyRow) -> None:
    """Note the planned tokens of a micro-batch that crashed while it was computed alone.

    Nothing of it landed, but it kept the engine from all others. Without this charge a tenant of
    requests that crash would always be the furthest behind, and go first.
    """
    connection.execute(_OCCUPIED, {"closed": held.id, "computed": held.tokens})


def hold(connection: Connection, micro_batch_id: int, epoch: int, owner: str) -> AnyRow | None:
    """Lock the micro-batch; None if this owner does not hold its lease at this epoch."""
    key = {"held": micro_batch_id, "at_epoch": epoch, "by": owner}
    return connection.execute(_HOLD, key).one_or_none()


def hold_all(connection: Connection, owner: str) -> Sequence[AnyRow]:
    """Lock every micro-batch that this owner has leased."""
    return connection.execute(_HOLD_ALL, {"by": owner}).all()


def check_members(micro_batch_id: int, given: AbstractSet[int], members: AbstractSet[int]) -> None:
    """Raise StoreError for results of requests that the micro-batch does not hold."""
    if foreign := given - members:
        raise StoreError(f"micro-batch {micro_batch_id} has no open requests {sorted(foreign)[:5]}")

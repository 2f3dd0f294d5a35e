"""Fair shares: which tenant's work goes next, measured in tokens that were computed.

Start-time fair queueing. Each tenant has a virtual time for each model: the tokens computed for it,
divided by its weight. The tenant with the smallest one goes first. What is in flight is added as an
estimate, from the micro-batches themselves, so that nothing is charged twice or lost. A tenant
without work saves nothing up: no virtual time counts as smaller than the model's clock, which is
the smallest virtual time of the tenants that have work.
"""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs import lifecycle
from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.store.account_tables import tenant
from nightjar.jobs.store.common import AnyRow
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.precedence import RANK, USUAL_WEIGHT, some_tenants, usable_weight
from nightjar.jobs.store.ready import HAS_READY
from nightjar.jobs.store.share_tables import share, virtual_clock
from nightjar.jobs.store.tables import UNCHARGED, job, micro_batch

CHARGED_PER_STEP = 1_000
# Each micro-batch keeps so much of the pace that was known before it.
_PACE_KEPT = 0.9
_LEAST_PACE, _MOST_PACE = 0.01, 10.0

_mb = micro_batch.c
_of_model = sa.bindparam("of_model", type_=sa.String)
# Built once, as each tick uses them: building costs more than running.
_STANDING = (share.c.virtual_time, share.c.pace, tenant.c.weight)
_with_ready = (
    sa.select(job.c.tenant, sa.func.min(RANK[0]).label("first"))
    .where(job.c.state.in_(lifecycle.RUNNABLE), HAS_READY)
    .group_by(job.c.tenant)
    .subquery()
)
_WITH_READY = sa.select(*_with_ready.c, *_STANDING).select_from(
    _with_ready.outerjoin(tenant, tenant.c.name == _with_ready.c.tenant).outerjoin(
        share, (share.c.tenant == _with_ready.c.tenant) & (share.c.fingerprint == _of_model)
    )
)
_is_in_flight = _mb.state.in_([MicroBatchState.DISPATCHED, MicroBatchState.LEASED])
_IN_FLIGHT = (
    sa.select(job.c.tenant, sa.func.sum(_mb.tokens))
    .join_from(micro_batch, job, job.c.id == _mb.job_id)
    .where(_is_in_flight, _mb.fingerprint == _of_model)
    .group_by(job.c.tenant)
)
# Repeats the condition of the partial index, so that the database uses that index.
_NOT_CHARGED = (
    sa.select(job.c.tenant, sa.func.sum(_mb.uncharged))
    .join_from(micro_batch, job, job.c.id == _mb.job_id)
    .where(UNCHARGED, _mb.fingerprint == _of_model)
    .group_by(job.c.tenant)
)
_CLOCK = sa.select(virtual_clock.c.virtual_time).where(virtual_clock.c.fingerprint == _of_model)
_LATEST = sa.select(sa.func.max(share.c.virtual_time)).where(share.c.fingerprint == _of_model)
_ANY_UNCHARGED = sa.select(sa.literal(1)).select_from(micro_batch).where(UNCHARGED).limit(1)
_TO_CHARGE = (
    sa.select(_mb.id, _mb.fingerprint, _mb.tokens, _mb.uncharged, job.c.tenant, tenant.c.weight)
    .join_from(micro_batch, job, job.c.id == _mb.job_id)
    .outerjoin(tenant, tenant.c.name == job.c.tenant)
    .where(UNCHARGED)
    .order_by(_mb.fingerprint, _mb.id)
    .limit(CHARGED_PER_STEP)
    .with_for_update(of=micro_batch)
)
_SET_CHARGED = sa.update(micro_batch).where(_mb.id == sa.bindparam("charged"))
_ALL = (
    sa.select(share, tenant.c.weight)
    .outerjoin(tenant, tenant.c.name == share.c.tenant)
    .order_by(share.c.fingerprint, share.c.tenant)
)
_of_tenant = sa.bindparam("of_tenant", type_=sa.String)
_own = sa.and_(share.c.fingerprint == _of_model, share.c.tenant == _of_tenant)
_TIME = sa.select(share.c.virtual_time).where(_own)
_SHARE = sa.select(share.c.virtual_time, share.c.pace).where(_own).with_for_update()
_CHARGE = (
    sa.update(share)
    .where(_own)
    .values(
        virtual_time=sa.bindparam("moved_to"),
        pace=sa.bindparam("new_pace"),
        computed_tokens=share.c.computed_tokens + sa.bindparam("more", type_=sa.BigInteger),
    )
)


@dataclass(slots=True)
class Standing:
    """A tenant that has work for a model.

    first: The rank of its first job with ready micro-batches; None if all of its work is in flight.
    virtual_time: With what is in flight.
    """

    tenant: str
    weight: float
    pace: float
    virtual_time: float
    first: Any

    def cost(self, tokens: int) -> float:
        """How far these planned tokens will move the virtual time, as far as is known."""
        return tokens * self.pace / self.weight


@dataclass(frozen=True, slots=True)
class TenantShare:
    """What a model has computed for a tenant, as far as it is charged."""

    fingerprint: str
    tenant: str
    weight: float
    computed_tokens: int
    virtual_time: float


def standings(connection: Connection, fingerprint: str) -> list[Standing]:
    """The tenants that have ready micro-batches or some in flight for the model."""
    key = {"of_model": fingerprint}
    clock = connection.scalar(_CLOCK, key) or 0.0
    due = dict(connection.execute(_NOT_CHARGED, key).all())
    in_flight = dict(connection.execute(_IN_FLIGHT, key).all())
    found = []
    for row in connection.execute(_WITH_READY, key):
        begins = max(row.virtual_time or 0.0, clock)
        one = Standing(row.tenant, usable_weight(row.weight), row.pace or 1.0, begins, row.first)
        one.virtual_time += float(due.get(row.tenant, 0)) / one.weight
        one.virtual_time += one.cost(int(in_flight.pop(row.tenant, 0)))
        found.append(one)
    # Of the others, only that they are there matters: they have nothing that could go next.
    return found + [Standing(name, USUAL_WEIGHT, 1.0, math.inf, None) for name in in_flight]


class Shares:
    """Charges tenants for what was computed."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> list[TenantShare]:
        """The shares of every model and tenant that has been computed for."""
        with self._database.reading() as connection:
            return [
                TenantShare(
                    row.fingerprint,
                    row.tenant,
                    usable_weight(row.weight),
                    row.computed_tokens,
                    row.virtual_time,
                )
                for row in connection.execute(_ALL)
            ]

    def settle(self, patience_s: float = math.inf) -> int:
        """Charge what has ended since the last call; returns how many micro-batches that were.

        No step begins after `patience_s` seconds; the next call goes on. What is not charged yet
        counts nevertheless: `standings` adds it.
        """
        deadline = time.monotonic() + patience_s
        settled, models = 0, set[str]()
        with self._database.reading() as connection:  # an idle system needs no lock
            left = connection.scalar(_ANY_UNCHARGED) is not None
        while left and (not settled or time.monotonic() < deadline):
            # Not durable: if it is undone, the marks are back, too, and it is charged again.
            charged, of_models = self._database.write(self._charge_some, durable=False)
            settled += charged
            models |= of_models
            left = charged == CHARGED_PER_STEP
        for fingerprint in sorted(models):
            with self._database.reading() as connection:
                moment = _moment(connection, fingerprint)
            advance = partial(self._advance, fingerprint=fingerprint, moment=moment)
            self._database.write(advance, durable=False)
        return settled

    def _charge_some(self, connection: Connection) -> tuple[int, set[str]]:
        ended: dict[tuple[str, str], list[AnyRow]] = defaultdict(list)
        rows = connection.execute(_TO_CHARGE).all()
        for row in rows:
            ended[row.fingerprint, row.tenant].append(row)
        if rows:
            done = _SET_CHARGED.values(uncharged=None)
            connection.execute(done, [{"charged": row.id} for row in rows])
        for (fingerprint, name), some in sorted(ended.items(), key=_key):
            self._charge(connection, fingerprint, name, some)
        return len(rows), {fingerprint for fingerprint, _ in ended}

    def _charge(
        self, connection: Connection, fingerprint: str, name: str, ended: Sequence[AnyRow]
    ) -> None:
        key = {"of_model": fingerprint, "of_tenant": name}
        empty = {"fingerprint": fingerprint, "tenant": name}
        connection.execute(self._database.insert(share).values(empty).on_conflict_do_nothing())
        virtual_time, pace = connection.execute(_SHARE, key).one()
        computed = sum(row.uncharged for row in ended)
        clock = connection.scalar(_CLOCK, {"of_model": fingerprint}) or 0.0
        kept = _PACE_KEPT ** len(ended)
        latest = computed / max(1, sum(row.tokens for row in ended))
        latest = min(_MOST_PACE, max(_LEAST_PACE, latest))
        values = {
            "moved_to": max(virtual_time, clock) + computed / usable_weight(ended[0].weight),
            "new_pace": kept * pace + (1.0 - kept) * latest,
            "more": computed,
        }
        connection.execute(_CHARGE, key | values)

    def _advance(self, connection: Connection, fingerprint: str, moment: float) -> None:
        row = {"fingerprint": fingerprint, "virtual_time": moment}
        insert = self._database.insert(virtual_clock).values(row)
        connection.execute(
            insert.on_conflict_do_update(
                index_elements=[virtual_clock.c.fingerprint],
                set_={"virtual_time": moment},
                where=virtual_clock.c.virtual_time < moment,
            )
        )


def _moment(connection: Connection, fingerprint: str) -> float:
    """The smallest virtual time of the tenants that have work for the model.

    Without any, the largest of all: so nobody comes back with credit from before. Work in flight is
    not added, else a tenant's charge would begin later than its work did.
    """
    key = {"of_model": fingerprint}
    few = some_tenants(connection)
    if len(few) > 1:
        times = {row.tenant: row.virtual_time for row in connection.execute(_WITH_READY, key)}
        few = {row.tenant for row in connection.execute(_IN_FLIGHT, key)} - times.keys()
    else:  # whether its work is ready makes no difference: nobody is beside it
        times = {}
    times |= {name: connection.scalar(_TIME, key | {"of_tenant": name}) for name in few}
    if not times:
        return connection.scalar(_LATEST, key) or 0.0
    return min(time_ or 0.0 for time_ in times.values())


def _key(item: tuple[tuple[str, str], Any]) -> tuple[str, str]:
    return item[0]

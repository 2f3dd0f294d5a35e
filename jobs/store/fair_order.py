"""The order of dispatching where several tenants have work for one model."""

from dataclasses import replace
from heapq import heapify, heappop, heappush

from sqlalchemy.engine import Connection

from nightjar.jobs.records import MicroBatchRef
from nightjar.jobs.store.ready import in_rank_order
from nightjar.jobs.store.shares import standings

# How many micro-batches of a tenant's job are read at first: most passes have room for a few.
_PAGE = 4


def in_fair_order(connection: Connection, fingerprint: str, most: int) -> list[MicroBatchRef]:
    """Up to `most` ready micro-batches; each time the next one of the tenant furthest behind.

    Each that is taken moves its tenant forward by its estimated cost. Within a tenant, jobs go by
    their rank. A tenant alone has the order and the statements of a deployment without tenants.

    Priorities count within a tenant. So none of these micro-batches is urgent for the broker, which
    would serve it before those of all other tenants.
    """
    found = standings(connection, fingerprint)
    if len(found) < 2:
        return list(in_rank_order(connection, fingerprint, most))
    by_name = {one.tenant: one for one in found}
    # Of equal ones, the tenant whose job came first.
    waiting = [(one.virtual_time, one.first, one.tenant) for one in found if one.first is not None]
    heapify(waiting)
    reading = {}
    taken: list[MicroBatchRef] = []
    while waiting and len(taken) < most:
        virtual_time, first, name = heappop(waiting)
        if name not in reading:
            left = most - len(taken)
            reading[name] = in_rank_order(connection, fingerprint, left, tenant=name, page=_PAGE)
        ref = next(reading[name], None)
        if ref is None:
            continue
        taken.append(replace(ref, urgent=False))
        heappush(waiting, (virtual_time + by_name[name].cost(ref.tokens), first, name))
    return taken

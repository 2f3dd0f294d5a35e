"""Which jobs go before others: by rank, by the tenants' shares, or before all of them."""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs import lifecycle
from nightjar.jobs.states import JobState
from nightjar.jobs.store.tables import job

# Which job of a tenant goes first: by its creation, less what its priority is worth.
RANK = (sa.func.coalesce(job.c.rank_at, job.c.created_at), job.c.id)

OVERTAKES: sa.ColumnElement[bool] = job.c.live
"""Which jobs go before those of other tenants, whatever the shares: single calls.

A priority is no reason: it counts among the jobs of one tenant. Whatever goes first here is charged
to its tenant nevertheless.
"""

# A tenant without a row has this weight.
USUAL_WEIGHT = 1.0
# Weights beyond these count as these, so that nobody is kept from ever being served.
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-3, 1e6


def _edge(state: JobState, *, last: bool) -> sa.ScalarSelect[str]:
    """The first or the last tenant in the alphabet that has a job in this state."""
    order = job.c.tenant.desc() if last else job.c.tenant
    found = sa.select(job.c.tenant).where(job.c.state == state).order_by(order).limit(1)
    return found.scalar_subquery()


# Built once, as each pass uses it: building costs more than running. A step in the index for each,
# however many jobs there are.
_EDGES = sa.select(
    *(_edge(state, last=last) for state in lifecycle.RUNNABLE for last in (False, True))
)


def some_tenants(connection: Connection) -> set[str]:
    """Up to four tenants that have open jobs; all of them if there are fewer than two."""
    return {name for name in connection.execute(_EDGES).one() if name is not None}


def several_tenants(connection: Connection) -> bool:
    """Whether jobs of more than one tenant are open."""
    return len(some_tenants(connection)) > 1


def usable_weight(weight: float | None) -> float:
    """The weight that counts for a tenant's weight as it is stored, or None without a row."""
    if weight is None:
        return USUAL_WEIGHT
    return min(_MOST_WEIGHT, weight) if weight > _LEAST_WEIGHT else _LEAST_WEIGHT

"""Equal requests of one job: one is computed, the original; its followers share its outcome.

The column `leader_id` names the original. Whatever ends the original (an answer, a failure, a
cancel) also ends its followers, in the same transaction if they fit. `Outcomes.land` is the one
place where outcomes land.
"""

import json
from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs import lifecycle
from nightjar.jobs.states import RequestState, Reuse
from nightjar.jobs.store.common import TOKEN_COUNTS
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.parts import InPartOf
from nightjar.jobs.store.tables import request, result

# A leader has fewer followers than this. So a request that a job repeats a million times has many
# leaders, and lands in many transactions.
MOST_EQUAL = 1_000
# One transaction lands at most so many; the next ones land the rest.
FOLLOWERS_PER_STEP = 2_000
COUNTED_STATES = {
    RequestState.DONE: "completed",
    RequestState.FAILED: "failed",
    RequestState.CANCELLED: "cancelled",
}

# Repeats the condition of the partial index, so that the database uses that index.
IS_FOLLOWING = sa.and_(request.c.state == RequestState.FOLLOWING, request.c.leader_id.is_not(None))
_leader = request.alias("leader")
_SHARED = [
    column.name
    for column in result.c
    if column.name not in ("request_id", "job_id", "row_index", "reused", "landing")
]


def has_equals(connection: Connection, staged: sa.Table) -> bool:
    """Whether any two staged rows have the same digest."""
    row = staged.c
    repeated = (
        sa.select(sa.literal(1))
        .where(row.digest.is_not(None))
        .group_by(row.digest)
        .having(sa.func.count() > 1)
        .limit(1)
    )
    return connection.scalar(repeated) is not None


def rows_that_follow(staged: sa.Table) -> sa.Select[tuple[int, int]]:
    """`row_index` of each staged row that is equal to an earlier one, and `first`, the row it
    follows: the first with its digest, MOST_EQUAL in a group."""
    row = staged.c
    place = sa.func.row_number().over(partition_by=row.digest, order_by=row.row_index)
    numbered = (
        sa.select(row.row_index, row.digest, ((place - 1) // MOST_EQUAL).label("part"))
        .where(row.digest.is_not(None), row.error_code.is_(None))
        .subquery()
    )
    group = [numbered.c.digest, numbered.c.part]
    first = sa.func.min(numbered.c.row_index).over(partition_by=group)
    grouped = sa.select(numbered.c.row_index, first.label("first")).subquery()
    return sa.select(grouped.c.row_index, grouped.c.first).where(
        grouped.c.row_index != grouped.c.first
    )


def follow_equals(connection: Connection, staged: sa.Table, job_id: str) -> None:
    """Let each queued request follow the first one that is equal."""
    rows = rows_that_follow(staged).subquery()
    led = (
        sa.select(rows.c.row_index, _leader.c.id)
        .join(
            _leader,
            sa.and_(
                _leader.c.job_id == job_id,
                InPartOf(_leader.c.id, job_id),
                _leader.c.row_index == rows.c.first,
            ),
        )
        .subquery()
    )
    lifecycle.check_step(lifecycle.REQUEST_TRANSITIONS, RequestState.QUEUED, RequestState.FOLLOWING)
    if connection.dialect.name == "postgresql":
        # It has no statistics of the new rows. It would take them for a few, and compare all with
        # all.
        connection.exec_driver_sql("SET LOCAL enable_nestloop TO off")
    connection.execute(
        sa.update(request)
        .where(
            request.c.job_id == job_id,
            InPartOf(request.c.id, job_id),
            request.c.row_index == led.c.row_index,
        )
        .values(state=RequestState.FOLLOWING, leader_id=led.c.id)
    )
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL enable_nestloop TO DEFAULT")


class Followers:
    """Lands the outcomes that followers share with their leaders."""

    def __init__(self, database: Database) -> None:
        self._is_sqlite = database.is_sqlite
        of_job = sa.bindparam("job", type_=sa.Text)
        # Locked, so that a follower that another transaction ends now is seen as ended below. Not
        # sorted: that would read all of them. Whoever lands them has locked their leader before.
        self._lock = (
            sa.select(request.c.id)
            .where(
                IS_FOLLOWING,
                request.c.job_id == of_job,
                InPartOf(request.c.id, of_job),
                _is_listed(request.c.leader_id, "leaders", is_sqlite=database.is_sqlite),
            )
            .limit(FOLLOWERS_PER_STEP)
            .with_for_update()
        )
        led = (
            IS_FOLLOWING,
            _is_listed(request.c.id, "followers", is_sqlite=database.is_sqlite),
            InPartOf(request.c.id, of_job),
        )
        its_result = sa.and_(
            result.c.request_id == request.c.leader_id, InPartOf(result.c.request_id, of_job)
        )
        is_leader = sa.and_(_leader.c.id == request.c.leader_id, InPartOf(_leader.c.id, of_job))
        shared = sa.join(request, result, its_result).join(_leader, is_leader)
        sums = [sa.func.sum(result.c[name]).label(name) for name in TOKEN_COUNTS]
        self._count = (
            sa.select(_leader.c.state, sa.func.count().label("followers"), *sums)
            .select_from(shared)
            .where(*led)
            .group_by(_leader.c.state)
        )
        reused = sa.case(
            (result.c.error_code.is_(None), sa.func.coalesce(result.c.reused, Reuse.JOB))
        )
        outcomes = (
            sa.select(
                request.c.id,
                request.c.job_id,
                request.c.row_index,
                *(result.c[name] for name in _SHARED),
                reused,
                sa.bindparam("token", type_=sa.BigInteger),
            )
            .select_from(shared)
            .where(*led)
        )
        names = ["request_id", "job_id", "row_index", *_SHARED, "reused", "landing"]
        self._copy = sa.insert(result).from_select(names, outcomes)
        of_leader = sa.select(_leader.c.state).where(is_leader)
        self._end = (
            sa.update(request)
            .where(*led)
            .values(state=of_leader.scalar_subquery())
            .execution_options(synchronize_session=False)
        )

    def land(
        self,
        connection: Connection,
        job_id: str,
        leaders: Sequence[int],
        more: dict[str, int],
        token: int,
    ) -> Sequence[int]:
        """Give the followers of ended requests their outcomes; returns the followers' ids.

        At most FOLLOWERS_PER_STEP land; if so many did, more may be left. Adds to `more` what they
        add to the job's counters; `token` is that of the landing.
        """
        given = {"job": job_id, "leaders": self._listed(leaders)}
        found = connection.scalars(self._lock, given).all()
        if not found:
            return ()
        key = {"job": job_id, "followers": self._listed(found)}
        for row in connection.execute(self._count, key).all():
            lifecycle.check_step(lifecycle.REQUEST_TRANSITIONS, RequestState.FOLLOWING, row.state)
            more[COUNTED_STATES[row.state]] += row.followers
            for name in TOKEN_COUNTS:
                more[name] += int(getattr(row, name))
            if row.state == RequestState.DONE:
                more["reused"] += row.followers
                more["reused_tokens"] += int(row.prompt_tokens + row.completion_tokens)
        connection.execute(self._copy, key | {"token": token})
        connection.execute(self._end, key)
        return found

    def _listed(self, ids: Sequence[int]) -> str | Sequence[int]:
        return json.dumps(ids) if self._is_sqlite else ids


def _is_listed(column: sa.Column[int], name: str, *, is_sqlite: bool) -> sa.ColumnElement[bool]:
    """Whether an id is in the array parameter `name`, on SQLite one in JSON."""
    if is_sqlite:
        listed = sa.func.json_each(sa.bindparam(name, type_=sa.Text)).table_valued("value")
        return column.in_(sa.select(listed.c.value))
    return column == sa.any_(sa.bindparam(name, type_=sa.ARRAY(sa.BigInteger)))

"""Deletes the rows of jobs that are marked as purged, in steps that are bounded in rows and bytes.

The job's own row stays, with its counts, usage and times. Everything else of it goes: requests with
their token ids, results, micro-batches, the order of landing, kept versions of prompt vectors.

On PostgreSQL the requests, bodies and results of a day share partitions (`jobs/store/parts.py`).
Once all jobs of a day are marked, its partitions are dropped, and no row of them is deleted. A job
of an old day waits a while for the other jobs of that day; then its rows are deleted like those of
a job that is younger.

Nothing here decides whether a job may go: `jobs/store/retention.py` marks it. So a process may die
between any two steps, and the next one goes on.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.purge_records import PurgeScope
from nightjar.jobs.store.answer_packs import body_octets, delete_answer_packs
from nightjar.jobs.store.body_rows import delete_bodies_alone, delete_packs
from nightjar.jobs.store.common import now, octets
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.newest_rows import NewestRows, newest_rows
from nightjar.jobs.store.partitions import Partitions
from nightjar.jobs.store.parts import InPartOf, in_parts_of, part_of_job
from nightjar.jobs.store.tables import (
    PURGING,
    body_pack,
    job,
    landing,
    micro_batch,
    request,
    request_body,
    result,
)
from nightjar.jobs.store.turns import Turns
from nightjar.jobs.store.vector_tables import job_prompt_vector
from nightjar.jobs.store.vectors import delete_kept

ROWS_PER_STEP = 500
BYTES_PER_STEP = 4 << 20
LANDINGS_PER_STEP = 200  # each may hold the ids of thousands of requests
JOBS_PER_SWEEP = 100
_NONE = NewestRows(0, 0, frozenset())
_MARKED = sa.select(job.c.id).where(PURGING).order_by(job.c.id).limit(JOBS_PER_SWEEP)
WAITS_S = 86_400.0
"""So long a marked job waits for the others of its day, so that their rows go without a delete."""

_EMPTIED = {
    "body": None,
    "segments": None,
    "custom_id": None,
    "prompt_vector": None,
    "adapter": None,
    "kind": None,
    "micro_batch_id": None,
    "leader_id": None,
}


class Purging:
    """Frees what marked jobs hold; safe to run in several processes at once."""

    def __init__(self, database: Database, partitions: Partitions) -> None:
        self._database = database
        self._partitions = partitions
        # PostgreSQL never gives a number of a sequence again.
        self._keeps_newest = database.is_sqlite
        self._some = _some_requests(database)
        # How far the rows of a job are deleted. PostgreSQL would read the dead ones again.
        self._after: dict[str, int] = {}

    def marked(self, scope: PurgeScope, *, waits: bool = False) -> list[str]:
        """The jobs of the scope that are marked and hold rows that can go, in the order of ids.

        `waits` as in `free`.
        """
        statement = _MARKED
        if scope.job_id is not None:
            statement = statement.where(job.c.id == scope.job_id)
        if scope.tenant is not None:
            statement = statement.where(job.c.tenant == scope.tenant)
        with self._database.reading() as connection:
            found = list(connection.scalars(statement))
        waiting = self._waiting(found) if waits else set()
        return [one for one in found if one not in waiting and self._has_more(one)]

    def free(self, job_id: str, deadline: float = float("inf"), *, waits: bool = False) -> int:
        """Delete rows of a marked job; returns how many requests went.

        At least one step is made; none begins after `deadline`, in monotonic seconds. With `waits`
        a job whose partition can be dropped soon keeps its rows until then.
        """
        if waits and self._waiting([job_id]):
            return 0
        # A purge is in no hurry: whoever waits for SQLite's lock waits for one step of it.
        turns, freed = Turns(self._database, write_s=0.0), 0
        while self._has_more(job_id):
            step = self._database.write(partial(self._step, job_id=job_id), durable=False)
            if step is None:
                break
            freed += step
            if time.monotonic() >= deadline:
                return freed
            turns.give()
        self._after.pop(job_id, None)
        return freed

    def drop_parts(self) -> int:
        """Drop the partitions of old days all of whose jobs are marked; returns how many days."""
        with self._database.reading() as connection:
            if connection.scalar(_MARKED.limit(1)) is None:  # most calls
                return 0
        dropped = 0
        for part in self._partitions.old():
            if not self._partitions.is_needed(part):
                dropped += self._partitions.drop(part)
        return dropped

    def _waiting(self, job_ids: Sequence[str]) -> set[str]:
        """Those of the marked jobs whose rows go with their partition soon."""
        parts = {job_id: part_of_job(job_id) for job_id in job_ids}
        if not any(map(self._partitions.is_old, parts.values())):
            return set()
        there = set(self._partitions.old())
        since = now() - timedelta(seconds=WAITS_S)
        waiting = sa.select(job.c.id).where(
            job.c.id.in_([job_id for job_id, part in parts.items() if part in there]),
            job.c.purged_at > since,
        )
        with self._database.reading() as connection:
            return set(connection.scalars(waiting))

    def _step(self, connection: Connection, job_id: str) -> int | None:
        """Delete some rows; returns how many requests, or None where nothing more can be done.

        Requests go before the micro-batches that they refer to. What is left of a small job goes in
        one step.
        """
        newest = self._newest(connection)
        count, has_more = self._delete_requests(connection, job_id, newest)
        if has_more:
            return count
        _empty_newest(connection, job_id, newest)
        if _holds(connection, request, job_id, newest.request_id):
            return count or None  # another process has locked them: it deletes them, too
        if _delete_micro_batches(connection, job_id, newest) == ROWS_PER_STEP:
            return count
        if _delete_landings(connection, job_id) == LANDINGS_PER_STEP:
            return count
        if delete_kept(connection, job_id, ROWS_PER_STEP) == ROWS_PER_STEP:
            return count
        if not _holds(connection, request, job_id) and not _holds(connection, micro_batch, job_id):
            connection.execute(sa.update(job).where(job.c.id == job_id).values(purging=False))
        return count

    def _delete_requests(
        self, connection: Connection, job_id: str, newest: NewestRows
    ) -> tuple[int, bool]:
        """Delete requests with their results; returns how many, and whether a step is full."""
        after = self._after.get(job_id, -1)
        key = {"of_job": job_id, "newest": newest.request_id, "after": after}
        key["part"] = part_of_job(job_id)
        found = connection.execute(self._some, key).all()
        if not found and after != -1:  # what another process had locked may be left
            found = connection.execute(self._some, key | {"after": -1}).all()
        if not found:
            return 0, False
        count = _fitting([row.size for row in found])
        ids = [row.id for row in found[:count]]
        column = result.c.request_id
        answers = sa.delete(result).where(column.in_(ids), in_parts_of(column, ids))
        packs = connection.scalars(answers.returning(result.c.pack_id)).all()
        # Other answers of a pack are of this job, too, and nobody reads them any more.
        delete_answer_packs(connection, set(packs) - {None})
        delete_bodies_alone(connection, ids)
        last = found[count - 1].row_index
        delete_packs(connection, job_id, last)
        column = request.c.id
        connection.execute(sa.delete(request).where(column.in_(ids), in_parts_of(column, ids)))
        self._after[job_id] = last
        return count, count < len(found) or count == ROWS_PER_STEP

    def _newest(self, connection: Connection) -> NewestRows:
        return newest_rows(connection) if self._keeps_newest else _NONE

    def _has_more(self, job_id: str) -> bool:
        """Whether a step would change anything: rows that are newest wait for newer ones."""
        with self._database.reading() as connection:
            if not connection.scalar(sa.select(job.c.purging).where(job.c.id == job_id)):
                return False
            newest = self._newest(connection)
            if job_id not in newest.job_ids:
                return True
            full = sa.select(request.c.id).where(
                request.c.id == newest.request_id,
                request.c.job_id == job_id,
                sa.or_(request.c.kind.is_not(None), request.c.micro_batch_id.is_not(None)),
            )
            return (
                connection.scalar(full) is not None
                or _holds(connection, request, job_id, newest.request_id)
                or _holds(connection, micro_batch, job_id, newest.micro_batch_id)
                or _holds(connection, landing, job_id)
                or _holds(connection, job_prompt_vector, job_id)
            )


def _some_requests(database: Database) -> sa.Select[int, int, int]:
    """The next requests, with about the bytes of each; those that somebody has locked are left."""
    of_job = sa.bindparam("of_job", type_=sa.Text)
    sizes = (
        sa.select(body_octets(is_sqlite=database.is_sqlite)).where(
            result.c.request_id == request.c.id, InPartOf(result.c.request_id, of_job)
        ),
        sa.select(octets(request_body.c.body, is_sqlite=database.is_sqlite)).where(
            request_body.c.request_id == request.c.id, InPartOf(request_body.c.request_id, of_job)
        ),
        # A pack counts at its first row.
        sa.select(body_pack.c.bytes).where(
            body_pack.c.job_id == of_job,
            body_pack.c.part == sa.bindparam("part"),
            body_pack.c.first_row == request.c.row_index,
        ),
    )
    size = sum((sa.func.coalesce(one.scalar_subquery(), 0) for one in sizes), sa.literal(0))
    return (
        sa.select(request.c.id, request.c.row_index, size.label("size"))
        .where(
            request.c.job_id == of_job,
            InPartOf(request.c.id, of_job),
            request.c.row_index > sa.bindparam("after", type_=sa.BigInteger),
            request.c.id != sa.bindparam("newest", type_=sa.BigInteger),
        )
        .order_by(request.c.row_index)
        .limit(ROWS_PER_STEP)
        .with_for_update(of=request, skip_locked=True)
    )


def _fitting(sizes: Sequence[int]) -> int:
    """How many of the first rows one transaction deletes; at least one, however large it is."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if count and total > BYTES_PER_STEP:
            return count
    return len(sizes)


def _empty_newest(connection: Connection, job_id: str, newest: NewestRows) -> None:
    """Take the content out of the newest request, which stays for its id."""
    if job_id not in newest.job_ids:
        return
    own = (request.c.id == newest.request_id, request.c.job_id == job_id)
    if connection.execute(sa.update(request).where(*own).values(_EMPTIED)).rowcount:
        answer = sa.delete(result).where(result.c.request_id == newest.request_id)
        packs = connection.scalars(answer.returning(result.c.pack_id)).all()
        delete_answer_packs(connection, set(packs) - {None})
        delete_bodies_alone(connection, [newest.request_id])
        delete_packs(connection, job_id)


def _delete_micro_batches(connection: Connection, job_id: str, newest: NewestRows) -> int:
    of_job = (micro_batch.c.job_id == job_id, micro_batch.c.id != newest.micro_batch_id)
    some = sa.select(micro_batch.c.id).where(*of_job).order_by(micro_batch.c.id)
    ids = connection.scalars(some.limit(ROWS_PER_STEP)).all()
    if ids:
        connection.execute(sa.delete(micro_batch).where(micro_batch.c.id.in_(ids)))
    return len(ids)


def _delete_landings(connection: Connection, job_id: str) -> int:
    first = landing.c.first
    some = sa.select(first).where(landing.c.job_id == job_id).order_by(first)
    firsts = connection.scalars(some.limit(LANDINGS_PER_STEP)).all()
    if firsts:
        connection.execute(sa.delete(landing).where(landing.c.job_id == job_id, first.in_(firsts)))
    return len(firsts)


def _holds(connection: Connection, table: sa.Table, job_id: str, but_for: int = 0) -> bool:
    """Whether the table has a row of the job, beside the one with this id."""
    statement = sa.select(table.c.job_id).where(table.c.job_id == job_id).limit(1)
    if table is request:
        statement = statement.where(InPartOf(request.c.id, job_id))
    if but_for:
        statement = statement.where(table.c.id != but_for)
    return connection.scalar(statement) is not None

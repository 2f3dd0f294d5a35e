"""Retention: which jobs have been kept for long enough, and from when nobody sees their rows.

The tenant's time counts, where it has one, else the deployment's. A job may ask for less, never for
more. All of them count from the end of the job; of a batch, from the moment of its result files.

A job is purged in two parts. One short transaction marks it: from then on every reader is told so.
Then its rows are deleted in steps (`jobs/store/purging.py`). A process that dies in between leaves
a job that is marked, and the next sweep goes on.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import LifecycleError, PurgedJobError
from nightjar.jobs.file_records import FileState
from nightjar.jobs.purge_records import ExpendableJob, PurgeReport, PurgeScope
from nightjar.jobs.records import DEFAULT_TENANT
from nightjar.jobs.states import BatchStage, MicroBatchState
from nightjar.jobs.store.account_tables import tenant
from nightjar.jobs.store.batch_tables import batch
from nightjar.jobs.store.common import has_rows, now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.file_tables import file
from nightjar.jobs.store.job_rows import find_job
from nightjar.jobs.store.purging import Purging
from nightjar.jobs.store.tables import KEPT, KEPT_BY_ITSELF, job, micro_batch

NOTED_PER_SWEEP = 500
MARKED_AT_ONCE = 20
_TENANTS_AT_ONCE = 500  # in one statement

_COLUMNS = (job.c.id, job.c.tenant, job.c.total, job.c.finished_at)
_of_job = micro_batch.c.job_id == job.c.id
_UNDER_WAY = (MicroBatchState.READY, MicroBatchState.DISPATCHED, MicroBatchState.LEASED)
# Nobody needs its rows any more: no lease, no charge of its tenant, no count of result files.
_IS_FREE = (
    *(~has_rows(micro_batch.c.id, _of_job, micro_batch.c.state == state) for state in _UNDER_WAY),
    ~has_rows(micro_batch.c.id, _of_job, micro_batch.c.uncharged.is_not(None)),
    ~has_rows(batch.c.job_id, batch.c.job_id == job.c.id, batch.c.stage != BatchStage.FINAL),
)
_EXPENDABLE = sa.select(*_COLUMNS).where(KEPT, *_IS_FREE)
_BY_ITSELF = (
    sa.select(*_COLUMNS)
    .where(KEPT_BY_ITSELF, job.c.finished_at.is_not(None), *_IS_FREE)
    .order_by(job.c.purge_at)
)
_IS_EXPORTED = sa.or_(job.c.exported_at.is_not(None), job.c.total == 0)
_ENDED_UNNOTED = (
    sa.select(job.c.id, job.c.finished_at, job.c.keep_results_s, batch.c.ended_at)
    .outerjoin(batch, batch.c.job_id == job.c.id)
    .where(
        KEPT_BY_ITSELF,
        job.c.purge_at.is_(None),
        job.c.finished_at.is_not(None),
        sa.or_(batch.c.job_id.is_(None), batch.c.stage == BatchStage.FINAL),
    )
    .limit(NOTED_PER_SWEEP)
)
_NOTE = (
    sa.update(job)
    .where(job.c.id == sa.bindparam("noted"), job.c.finished_at == sa.bindparam("ended"))
    .values(purge_at=sa.bindparam("until"))
)


class Retention:
    """Marks the jobs whose time is over, and frees what they hold."""

    def __init__(self, database: Database, purging: Purging) -> None:
        self._database = database
        self._purging = purging

    def sweep(self, scope: PurgeScope, patience_s: float = math.inf) -> PurgeReport:
        """Purge jobs of the scope, one after another, beginning with those that are marked.

        At least one step is made; none begins after `patience_s` seconds, and the next call goes on
        with the rest.
        """
        deadline = time.monotonic() + patience_s
        self._purging.drop_parts()
        report = self._free_marked(PurgeReport(), scope, deadline)
        while report.is_done and (found := self.expendable(scope, MARKED_AT_ONCE)):
            before = report.jobs
            for one in found:
                if self.mark(one):
                    report = replace(report, jobs=report.jobs + 1)
                    report = self._freed(report, one.id, scope, deadline)
                if time.monotonic() >= deadline:
                    return replace(report, is_done=False)
            if report.jobs == before:  # others came first
                break
        if report.is_done and report.jobs and scope.job_id is None:
            self._purging.drop_parts()
            report = self._free_marked(report, scope, deadline)
        return report

    def expendable(self, scope: PurgeScope, limit: int) -> list[ExpendableJob]:
        """Jobs of the scope that may be purged now."""
        self._note_times()
        found: dict[str, ExpendableJob] = {}
        with self._database.reading() as connection:
            for choice, takes_input in self._choices(connection, scope):
                statement = choice.where(_IS_EXPORTED) if _only_exported(scope) else choice
                room = limit - len(found)
                if room <= 0:
                    break
                for row in connection.execute(statement.limit(limit)):
                    one = ExpendableJob(row.id, row.tenant, row.total, row.finished_at, takes_input)
                    found.setdefault(one.id, one)
        return list(found.values())[:limit]

    def check(self, job_id: str) -> bool:
        """Whether the job may be purged now, or is marked and holds rows.

        Raises:
            UnknownJobError: There is no such job.
            PurgedJobError: Nothing is left of it to purge.
            LifecycleError: It is not over.
        """
        with self._database.reading() as connection:
            found = find_job(connection, job_id)
            purging = connection.scalar(sa.select(job.c.purging).where(job.c.id == job_id))
        if found.purged_at is not None and not purging:
            raise PurgedJobError(job_id, found.purged_at)
        if not found.is_over:
            raise LifecycleError(
                f"job {job_id} is {found.state.value}: only a job that is over can be purged; "
                "cancel it first"
            )
        return True

    def mark(self, one: ExpendableJob) -> bool:
        """Hide the job's rows from everybody, and its files; whether this call did.

        A retry may have come first, or another process.
        """
        return self._database.write(partial(_mark, one=one))

    def _free_marked(self, report: PurgeReport, scope: PurgeScope, deadline: float) -> PurgeReport:
        """Free jobs that are marked; nobody waits for a sweep of the settings, so that can wait."""
        before: list[str] = []
        while job_ids := self._purging.marked(scope, waits=scope.is_of_settings):
            for job_id in job_ids:
                rows = self._purging.free(job_id, deadline)
                report = replace(report, rows=report.rows + rows)
                if time.monotonic() >= deadline:
                    return replace(report, is_done=False)
            if job_ids == before:  # another process has locked what is left
                break
            before = job_ids
        return report

    def _freed(
        self, report: PurgeReport, job_id: str, scope: PurgeScope, deadline: float
    ) -> PurgeReport:
        """Free a job that was just marked, unless others of its day are about to be."""
        rows = self._purging.free(job_id, deadline, waits=scope.job_id is None)
        return replace(report, rows=report.rows + rows)

    def _note_times(self) -> None:
        """Note until when jobs are kept that ask for a time of their own and are over."""
        with self._database.reading() as connection:  # most calls find none, and need no lock
            found = connection.execute(_ENDED_UNNOTED).all()
        if not found:
            return
        times = [
            {
                "noted": row.id,
                "ended": row.finished_at,
                "until": (row.ended_at or row.finished_at) + timedelta(seconds=row.keep_results_s),
            }
            for row in found
        ]
        self._database.write(lambda connection: connection.execute(_NOTE, times), durable=False)

    def _choices(
        self, connection: Connection, scope: PurgeScope
    ) -> Iterator[tuple[sa.Select[Any], bool]]:
        """Yield statements that choose jobs, and whether a batch's uploaded file goes with them."""
        if scope.job_id is not None:
            yield _EXPENDABLE.where(job.c.id == scope.job_id, *_aged(scope)), True
            return
        if scope.older_than_s is not None:
            of_tenant = () if scope.tenant is None else (job.c.tenant == scope.tenant,)
            yield _EXPENDABLE.where(*of_tenant, *_aged(scope)), True
            return
        for names, keep_s in _limits(connection, scope):
            ended = job.c.finished_at <= now() - timedelta(seconds=keep_s)
            for start in range(0, len(names), _TENANTS_AT_ONCE):
                some = names[start : start + _TENANTS_AT_ONCE]
                yield _EXPENDABLE.where(job.c.tenant.in_(some), ended), True
        of_tenant = () if scope.tenant is None else (job.c.tenant == scope.tenant,)
        # OpenAI's `output_expires_after` is of the results alone.
        yield _BY_ITSELF.where(job.c.purge_at <= now(), *of_tenant), False


def _only_exported(scope: PurgeScope) -> bool:
    return scope.only_exported and scope.job_id is None


def _aged(scope: PurgeScope) -> tuple[sa.ColumnElement[bool], ...]:
    if scope.older_than_s is None:
        return ()
    return (job.c.finished_at <= now() - timedelta(seconds=scope.older_than_s),)


def _limits(connection: Connection, scope: PurgeScope) -> Iterator[tuple[list[str], float]]:
    """Yield tenants with the time that their jobs are kept; not those that keep them for ever."""
    known = connection.execute(sa.select(tenant.c.name, tenant.c.keep_results_s)).all()
    times: dict[str, float | None] = {DEFAULT_TENANT: None, **dict(known)}
    groups: dict[float, list[str]] = {}
    for name, own in times.items():
        keep_s = scope.keep_s if own is None else own
        if keep_s is not None and scope.tenant in (None, name):
            groups.setdefault(keep_s, []).append(name)
    for keep_s, names in groups.items():
        yield names, keep_s


def _mark(connection: Connection, one: ExpendableJob) -> bool:
    locked = _EXPENDABLE.where(job.c.id == one.id).with_for_update()
    if connection.execute(locked).one_or_none() is None:
        return False
    marked = sa.update(job).where(job.c.id == one.id)
    connection.execute(marked.values(purged_at=now(), purging=True))
    files = connection.execute(
        sa.select(batch.c.input_file_id, batch.c.output_file_id, batch.c.error_file_id).where(
            batch.c.job_id == one.id
        )
    ).one_or_none()
    if files is None:
        return True
    given, *made = files
    ids = [id_ for id_ in made if id_ is not None]
    if one.takes_input:
        ids.append(given)
    lock = sa.select(file.c.id).where(file.c.id.in_(ids), file.c.state == FileState.PROCESSED)
    there = set(connection.scalars(lock.order_by(file.c.id).with_for_update()))
    if given in there and _is_read_elsewhere(connection, given, one.id):
        there.discard(given)
    deleted = sa.update(file).where(file.c.id.in_(there))
    connection.execute(deleted.values(state=FileState.DELETING))
    return True


def _is_read_elsewhere(connection: Connection, file_id: str, job_id: str) -> bool:
    """Whether another batch of this file is still to be read, or is kept."""
    other = (
        sa.select(batch.c.job_id)
        .outerjoin(job, job.c.id == batch.c.job_id)
        .where(
            batch.c.input_file_id == file_id,
            batch.c.job_id != job_id,
            batch.c.stage.not_in([BatchStage.FAILED, BatchStage.CANCELLED]),
            job.c.purged_at.is_(None),
        )
        .limit(1)
    )
    return connection.scalar(other) is not None

"""Steps of runs of schedules: who takes one, and what came of it.

A process holds a step by its name, an epoch and a counter that rises while it lives. Others judge
by their own monotonic clocks whether the counter stands still. The epoch fences: what a process
writes that has lost its step changes nothing.
"""

from datetime import datetime
from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import LifecycleError
from nightjar.jobs.schedule_records import (
    ChangeAction,
    ClaimedRun,
    HeldRun,
    RunEnd,
    RunState,
)
from nightjar.jobs.states import BatchStage, JobState
from nightjar.jobs.store.batch_tables import batch
from nightjar.jobs.store.common import AnyRow
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.schedule_rows import (
    DEFINED,
    IS_OPEN,
    RUN_FIELDS,
    definition_of,
    end_run,
    note_change,
    run,
    run_record,
    schedule_record,
)
from nightjar.jobs.store.schedule_tables import schedule, schedule_run
from nightjar.jobs.store.tables import job

_EARLIER = schedule_run.alias("earlier")
# A schedule's runs go one after the other.
_IS_FIRST = sa.not_(
    sa.exists().where(
        _EARLIER.c.schedule_id == run.schedule_id,
        _EARLIER.c.ended_at.is_(None),
        _EARLIER.c.id < run.id,
    )
)
_JOB_IS_OVER = sa.exists().where(job.c.id == run.job_id, job.c.finished_at.is_not(None))
_OVER = (BatchStage.FAILED, BatchStage.CANCELLED, BatchStage.FINAL)
_CLAIMED = [*RUN_FIELDS, *DEFINED, schedule.c.name, schedule.c.task_digest, run.task, run.epoch]


class StaleRunError(LifecycleError):
    """A step of a run was taken from this process, or the run has ended."""


class ScheduleWork:
    """Gives steps of runs to processes, and records what came of them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, owner: str, moment: datetime) -> ClaimedRun | None:
        """Take the next step of a run of a task; None if there is none to take.

        A waiting run begins to read; a run whose job is over begins to write.
        """
        begins = sa.and_(run.state == RunState.WAITING, run.begin_at <= moment, _IS_FIRST)
        writes = sa.and_(run.state == RunState.COMPUTING, _JOB_IS_OVER)
        again = run.state.in_((RunState.READING, RunState.WRITING))
        first = (
            sa.select(run.id, run.state, run.epoch)
            .join(schedule, schedule.c.id == run.schedule_id)
            .where(IS_OPEN, run.owner.is_(None), schedule.c.file_id.is_(None))
            .where(sa.or_(run.retry_at.is_(None), run.retry_at <= moment))
            .where(sa.or_(begins, writes, again))
            .order_by(run.begin_at, run.id)
            .limit(1)
        )
        with self._database.reading() as connection:  # most calls find none, and need no lock
            found = connection.execute(first).one_or_none()
        if found is None:
            return None
        return self._database.write(partial(_take, found, owner, moment))

    def beat(self, owner: str) -> None:
        """Raise the counters of what a process holds."""
        beaten = sa.update(schedule_run).where(IS_OPEN, run.owner == owner)
        raised = beaten.values(beats=run.beats + 1)
        self._database.write(lambda connection: connection.execute(raised), durable=False)

    def held(self) -> list[HeldRun]:
        """Every step that a process holds."""
        found = sa.select(run.id, run.owner, run.epoch, run.beats).where(
            IS_OPEN, run.owner.is_not(None)
        )
        with self._database.reading() as connection:
            return [HeldRun(*row) for row in connection.execute(found)]

    def take_back(self, held: HeldRun) -> bool:
        """Free a step whose process is dead; False if the process has moved since."""
        unmoved = (run.owner == held.owner, run.epoch == held.epoch, run.beats == held.beats)
        freed = (
            sa.update(schedule_run)
            .where(run.id == held.run_id, IS_OPEN, *unmoved)
            .values(owner=None, epoch=run.epoch + 1)
        )
        return bool(self._database.write(lambda connection: connection.execute(freed).rowcount))

    def release(
        self, claimed: ClaimedRun, *, reason: str | None = None, retry_at: datetime | None = None
    ) -> None:
        """Give a step back, to be taken again at `retry_at`; without a reason it was no failure."""
        values: dict[str, object] = {"owner": None, "retry_at": retry_at}
        values |= {"attempts": run.attempts - 1} if reason is None else {"reason": reason}
        freed = sa.update(schedule_run).where(*_fence(claimed)).values(values)
        self._database.write(lambda connection: connection.execute(freed))

    def note_task(self, claimed: ClaimedRun, digest: str, actor: str, moment: datetime) -> None:
        """Note what the task file holds; a change since the last run is recorded."""
        before = claimed.task_digest
        if digest == before:
            return
        seen = schedule.c.task_digest.is_not_distinct_from(before)
        noted = (
            sa.update(schedule)
            .where(schedule.c.id == claimed.run.schedule_id, seen)
            .values(task_digest=digest)
            .returning(*schedule.c)
        )

        def work(connection: Connection) -> None:
            row = connection.execute(noted).one_or_none()
            if row is not None and before is not None:
                note_change(
                    connection,
                    schedule_record(row),
                    ChangeAction.TASK_CHANGED,
                    actor,
                    moment,
                    before={"task_digest": before},
                    after={"task_digest": digest},
                )

        self._database.write(work)

    def landed(self, connection: Connection, claimed: ClaimedRun, job_id: str, task: str) -> None:
        """Note, in the transaction that lands the job, that the run has its rows.

        Raises:
            StaleRunError: The step was taken from this process, or the run has ended.
        """
        noted = (
            sa.update(schedule_run)
            .where(*_fence(claimed), run.state == RunState.READING)
            .values(
                state=RunState.COMPUTING,
                job_id=job_id,
                task=task,
                owner=None,
                attempts=0,
                retry_at=None,
                reason=None,
            )
        )
        if not connection.execute(noted).rowcount:
            raise StaleRunError(f"run {claimed.run.id} is not to be read here any more")

    def finish(self, claimed: ClaimedRun, end: RunEnd, moment: datetime) -> bool:
        """End a run that this process holds; False if it was taken from it."""
        return self._database.write(
            lambda connection: end_run(
                connection, claimed.run.id, end, moment, *_fence(claimed)[1:]
            )
        )

    def files_to_begin(self, moment: datetime, limit: int) -> list[ClaimedRun]:
        """Waiting runs of uploaded files, of which a batch is to be made."""
        found = (
            sa.select(*_CLAIMED)
            .join(schedule, schedule.c.id == run.schedule_id)
            .where(IS_OPEN, run.state == RunState.WAITING, run.begin_at <= moment, _IS_FIRST)
            .where(schedule.c.file_id.is_not(None))
            .order_by(run.begin_at, run.id)
            .limit(limit)
        )
        with self._database.reading() as connection:
            return [_claimed(row) for row in connection.execute(found)]

    def batch_made(self, run_id: str, job_id: str, moment: datetime) -> bool:
        """Note the batch of a run; False if the run has ended since, so that nobody needs it."""
        noted = (
            sa.update(schedule_run)
            .where(run.id == run_id, IS_OPEN, run.state == RunState.WAITING)
            .values(state=RunState.COMPUTING, job_id=job_id, started_at=moment)
        )
        return bool(self._database.write(lambda connection: connection.execute(noted).rowcount))

    def fail_file(self, run_id: str, reason: str, moment: datetime) -> bool:
        """Fail a waiting run whose file cannot be used."""
        end = RunEnd(RunState.FAILED, reason)
        waits = run.state == RunState.WAITING
        return self._database.write(
            lambda connection: end_run(connection, run_id, end, moment, waits)
        )

    def end_batches(self, moment: datetime, limit: int) -> list[str]:
        """End runs whose batches are over; returns their ids."""
        found = (
            sa.select(run.id, batch.c.stage, job.c.state)
            .add_columns(job.c.total, job.c.completed, job.c.failed)
            .join(batch, batch.c.job_id == run.job_id)
            .join(schedule, schedule.c.id == run.schedule_id)
            .outerjoin(job, job.c.id == run.job_id)
            .where(IS_OPEN, run.state == RunState.COMPUTING, schedule.c.file_id.is_not(None))
            .where(batch.c.stage.in_(_OVER))
            .limit(limit)
        )
        with self._database.reading() as connection:
            rows = connection.execute(found).all()
        return [row.id for row in rows if self._end_batch(row, moment)]

    def _end_batch(self, row: AnyRow, moment: datetime) -> bool:
        if row.stage is BatchStage.FAILED:
            end = RunEnd(RunState.FAILED, "the file cannot be used; the batch says why")
        elif row.stage is BatchStage.CANCELLED:
            end = RunEnd(RunState.CANCELLED, "its batch was cancelled")
        else:
            end = end_of_job(row.state, row.total, row.completed, row.failed)
        return self._database.write(lambda connection: end_run(connection, row.id, end, moment))


def end_of_job(state: JobState, total: int, completed: int, failed: int) -> RunEnd:
    """How a run ends whose job has ended like this, when its answers are where they belong."""
    if state is JobState.CANCELLED:
        return RunEnd(RunState.CANCELLED, "its job was cancelled", total, completed, failed)
    if state is JobState.EXPIRED:
        return RunEnd(RunState.FAILED, "its job has expired", total, completed, failed)
    if not completed:
        return RunEnd(RunState.FAILED, "no row succeeded", total, completed, failed)
    return RunEnd(RunState.SUCCEEDED, None, total, completed, failed)


def _take(found: AnyRow, owner: str, moment: datetime, connection: Connection) -> ClaimedRun | None:
    begins_to_write = found.state is RunState.COMPUTING
    state = RunState.WRITING if begins_to_write else found.state
    taken = (
        sa.update(schedule_run)
        .where(run.id == found.id, IS_OPEN, run.owner.is_(None))
        .where(run.state == found.state, run.epoch == found.epoch)
        .values(
            state=RunState.READING if found.state is RunState.WAITING else state,
            owner=owner,
            epoch=run.epoch + 1,
            beats=0,
            attempts=1 if begins_to_write else run.attempts + 1,
            retry_at=None,
            started_at=sa.func.coalesce(run.started_at, moment),
        )
    )
    if not connection.execute(taken).rowcount:
        return None
    whole = sa.select(*_CLAIMED).join(schedule, schedule.c.id == run.schedule_id)
    return _claimed(connection.execute(whole.where(run.id == found.id)).one())


def _claimed(row: AnyRow) -> ClaimedRun:
    found = row._mapping
    return ClaimedRun(
        run=run_record(row),
        definition=definition_of(row),
        schedule_name=found[schedule.c.name],
        task_digest=found[schedule.c.task_digest],
        task=found[run.task],
        epoch=found[run.epoch],
    )


def _fence(claimed: ClaimedRun) -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions of a run that this claim still holds."""
    return (
        run.id == claimed.run.id,
        run.epoch == claimed.epoch,
        run.owner.is_not(None),
        IS_OPEN,
    )

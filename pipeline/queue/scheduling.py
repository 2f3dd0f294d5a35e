"""Schedules: a pass of the planner that leads decides which runs are due.

All decisions come from SQL: beat only wakes the pass, and the pass also looks by itself. A planned
time that has come moves the schedule to its next time and makes a run, in one transaction with a
unique key. So it makes no difference whether beat was away, ticked twice, or two planners looked.
"""

import hashlib
import logging
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from nightjar.jobs.batch_records import NewBatch
from nightjar.jobs.errors import UnknownFileError
from nightjar.jobs.schedule_records import LATE_S, ClaimedRun, Firing, Schedule, Trigger
from nightjar.jobs.schedules.fields import shown_span
from nightjar.jobs.schedules.times import ScheduleError, Timetable
from nightjar.jobs.store import Store
from nightjar.pipeline.settings import Settings

logger = logging.getLogger(__name__)

AT_ONCE = 100
"""Schedules or runs of one kind that one step handles."""

CHECK_EVERY_S = 60.0
"""Next times are compared with the clock and the time zones so often."""

KEEP_CHANGES_DAYS = 730
_AGAIN = timedelta(hours=1)


class Scheduling:
    """Makes runs of planned times, batches of uploaded files, and ends what is over.

    Args:
        store: Where the schedules are.
        keep_days: Runs older than this are deleted.
        idle_s: Seconds until the next look where nothing is due.
        clock: Gives the moment that decides; the database's clock unless given.
        monotonic: Seconds, for the rarer checks.
    """

    def __init__(
        self,
        store: Store,
        *,
        keep_days: float,
        idle_s: float,
        clock: Callable[[], datetime] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._runs = store.schedule_runs
        self._work = store.schedule_work
        self._keep = timedelta(days=keep_days)
        self._idle_s = idle_s
        self._clock = clock or store.schedule_runs.clock
        self._monotonic = monotonic
        self._checked_at = -CHECK_EVERY_S
        self._checked_to = ""

    @classmethod
    def of(cls, settings: Settings, store: Store) -> "Scheduling":
        """As a planner with these settings makes it."""
        return cls(store, keep_days=settings.schedule_keep_days, idle_s=settings.sweep_every_s)

    def step(self) -> float:
        """Handle what is due; returns the seconds until the next step."""
        moment = self._clock()
        due = self._runs.due(moment, AT_ONCE)
        for one in due:
            self.fire(one, moment)
        for claimed in self._work.files_to_begin(moment, AT_ONCE):
            self._begin_batch(claimed, moment)
        for run_id in self._runs.end_overdue(moment, AT_ONCE):
            logger.warning(
                "a run has come to its deadline", extra={"action": "run_overdue", "run": run_id}
            )
        for run_id in self._work.end_batches(moment, AT_ONCE):
            logger.info("a run is over", extra={"action": "run_ended", "run": run_id})
        self._cancel_jobs()
        self._check(moment)
        return 0.0 if len(due) == AT_ONCE else self._idle_s

    def fire(self, schedule: Schedule, moment: datetime) -> None:
        """Make the run of the last planned time that has come."""
        if schedule.next_at is None:
            return
        definition = schedule.definition
        try:
            times = Timetable(definition.cron, definition.time_zone)
            planned_at, missed = times.last(schedule.next_at, moment)
            next_at = times.after(moment)
        except ScheduleError as error:  # it was checked, but the time zones may have changed
            self._put_off(schedule, moment, error)
            return
        is_late = (moment - planned_at).total_seconds() > LATE_S
        reason = "it was missed: no planner was there at its time"
        firing = Firing(
            schedule,
            planned_at,
            next_at,
            missed,
            trigger=Trigger.CATCH_UP if is_late else Trigger.PLANNED,
            jitter_s=jitter_s(schedule, planned_at),
            skip_reason=reason if is_late and not definition.catch_up else None,
        )
        run = self._runs.fire(firing, moment)
        if run is not None:
            logger.info(
                "the schedule %s: the run of %s is %s",
                schedule.name,
                planned_at.isoformat(timespec="minutes"),
                run.state.value,
                extra={"action": "schedule_fired", "schedule": schedule.id, "run": run.id},
            )

    def _put_off(self, schedule: Schedule, moment: datetime, error: ScheduleError) -> None:
        self._runs.move_next(schedule, moment + _AGAIN)
        logger.error(
            "the schedule %s cannot be used: %s",
            schedule.name,
            error,
            extra={"action": "schedule_unusable", "schedule": schedule.id},
        )

    def _begin_batch(self, claimed: ClaimedRun, moment: datetime) -> None:
        """Make the batch of an uploaded file: once, by its idempotency key."""
        run, definition = claimed.run, claimed.definition
        left_s = max(1, int((run.deadline_at - moment).total_seconds()))
        new = NewBatch(
            endpoint=definition.endpoint or "",
            input_file_id=definition.file_id or "",
            tenant=run.tenant,
            completion_window=shown_span(definition.deadline_s),
            completion_window_s=float(left_s),
            metadata={"schedule": claimed.schedule_name, "run": run.id},
            model=definition.model,
            priority=definition.priority,
            output_expires_after_s=definition.keep_results_s,
            idempotency_key=f"schedule {run.id}",
            digest=hashlib.sha256(run.id.encode()).hexdigest(),
        )
        try:
            batch = self._store.batches.create(new)
        except UnknownFileError as error:
            self._work.fail_file(run.id, f"{error}; it was deleted or has expired", moment)
            return
        if not self._work.batch_made(run.id, batch.job_id, moment):
            self._store.stopping.request_cancel_if_there(batch.job_id)

    def _cancel_jobs(self) -> None:
        """Cancel the jobs of runs that were ended before them."""
        found = self._runs.jobs_to_cancel(AT_ONCE)
        for _, job_id in found:
            self._store.stopping.request_cancel_if_there(job_id)
        if found:
            self._runs.note_cancelled([run_id for run_id, _ in found])

    def _check(self, moment: datetime) -> None:
        """Correct next times, some at a time: a clock was set, or a time zone has other rules.

        A planned time that comes again has its run already, so that nothing runs twice.
        """
        if self._monotonic() - self._checked_at < CHECK_EVERY_S:
            return
        found = self._runs.asleep(moment, AT_ONCE, self._checked_to)
        for schedule in found:
            definition = schedule.definition
            try:
                expected = Timetable(definition.cron, definition.time_zone).after(moment)
            except ScheduleError:
                continue
            if expected != schedule.next_at:
                self._runs.move_next(schedule, expected)
        self._checked_to = found[-1].id if len(found) == AT_ONCE else ""
        if not self._checked_to:
            self._checked_at = self._monotonic()
            self._runs.prune(moment - self._keep, moment - timedelta(days=KEEP_CHANGES_DAYS))


def jitter_s(schedule: Schedule, planned_at: datetime) -> float:
    """Seconds by which a run begins later: the same number whoever computes it."""
    text = f"{schedule.id} {int(planned_at.timestamp())}"
    drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    return round(drawn * schedule.definition.jitter_s, 3)

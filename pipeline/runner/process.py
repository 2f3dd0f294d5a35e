"""`nightjar worker tasks`: takes steps of runs from SQL and does them, some at a time.

Several such processes may run. A process that dies loses its steps to another one, or to itself
when it is started again: at once where the kernel says that it is gone, else when its counter has
not moved for a while.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from datetime import datetime, timedelta
from types import FrameType

from nightjar import logs
from nightjar.jobs.errors import StoreError, StoreUnavailableError
from nightjar.jobs.schedule_records import ClaimedRun, HeldRun, RunEnd, RunState
from nightjar.jobs.store import Store
from nightjar.jobs.store.schedule_work import StaleRunError
from nightjar.pipeline.queue.liveness import is_gone, owner_name
from nightjar.pipeline.queue.opening import open_store
from nightjar.pipeline.queue.watched_time import WatchedTime
from nightjar.pipeline.runner.steps import StoppedError, TaskSteps, UnusableRunError
from nightjar.pipeline.settings import Settings
from nightjar.process import step_back

logger = logging.getLogger("nightjar.pipeline.runner.process")  # also where it is __main__

MOST_ATTEMPTS = 5
"""A step that fails so often, also by the death of its process, makes its run fail."""

FIRST_PAUSE_S = 10.0
GROWTH = 4
LONGEST_PAUSE_S = 600.0
_ENDING_S = 60.0


class TaskRunner:
    """Takes steps and does each in a thread.

    Args:
        store: Where runs are.
        settings: How many at a time, and how often signs of life are given.
        environment: Where the URLs of databases are looked up.
        clock: Gives the moment that decides what may begin; the database's unless given.
        first_pause_s: Seconds after the first failure of a step; GROWTH times as long after each.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        environment: Mapping[str, str],
        *,
        clock: Callable[[], datetime] | None = None,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._work = store.schedule_work
        self._runners = store.task_runners
        self._settings = settings
        self._clock = clock or store.schedule_runs.clock
        self._first_pause_s = first_pause_s
        self.owner = owner_name()
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._doing: dict[str, threading.Thread] = {}  # by run
        self.watched = WatchedTime(2 * settings.heartbeat_s)
        self._seen: dict[HeldRun, float] = {}  # when each was first seen as it is
        self._steps = TaskSteps(store, settings, environment, self._clock, self._stopping.is_set)

    def run(self) -> None:
        """Work until `stop`, then give back what has begun."""
        self._runners.begin(self.owner)
        beating = threading.Thread(target=self._beat, name="beat", daemon=True)
        beating.start()
        while not self._stopping.is_set():
            self._woken.clear()
            try:
                taken = self.take()
            except StoreError as error:
                logger.warning("cannot look: %s", error, extra={"action": "pass_waits"})
                taken = False
            if not taken:
                self._woken.wait(self._settings.sweep_every_s)
        deadline = time.monotonic() + _ENDING_S
        for thread in self._threads():
            thread.join(max(0.0, deadline - time.monotonic()))
        beating.join(self._settings.heartbeat_s + 1)
        with suppress(StoreError):  # else its sign grows old
            self._runners.end(self.owner)

    def stop(self) -> None:
        """Take nothing more; steps end at their next row."""
        self._stopping.set()
        self._woken.set()

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._stopping.is_set()

    def take(self) -> bool:
        """Take one step, if a thread is free; whether one was taken."""
        self._take_back()
        if len(self._threads()) >= self._settings.task_threads:
            return False
        claimed = self._work.claim(self.owner, self._clock())
        if claimed is None:
            return False
        thread = threading.Thread(
            target=self._do, args=(claimed,), name=f"run {claimed.run.id}", daemon=True
        )
        with self._lock:
            self._doing[claimed.run.id] = thread
        thread.start()
        return True

    def wait(self) -> None:
        """Wait until every step that was taken is done."""
        for thread in self._threads():
            thread.join()

    def _threads(self) -> list[threading.Thread]:
        with self._lock:
            return list(self._doing.values())

    def _do(self, claimed: ClaimedRun) -> None:
        run = claimed.run
        try:
            self.attempt(claimed)
        except StoreError as error:  # it is taken back when this process gives it up
            logger.warning(
                "the outcome of a step is not recorded: %s",
                error,
                extra={"action": "run_unrecorded", "run": run.id},
            )
        finally:
            with self._lock:
                self._doing.pop(run.id, None)
            self._woken.set()

    def attempt(self, claimed: ClaimedRun) -> None:
        """Take one claimed run as far as it goes now."""
        run = claimed.run
        logger.info(
            "%s a run of %s",
            run.state.value,
            claimed.schedule_name,
            extra={"action": f"run_{run.state.value}", "run": run.id, "attempt": run.attempts},
        )
        try:
            if run.attempts > MOST_ATTEMPTS:
                self._give_up(claimed, run.reason or "the process that did it has died")
                return
            self._steps.do(claimed)
        except StoppedError:
            self._work.release(claimed)
        except StaleRunError as error:
            logger.info("%s", error, extra={"action": "run_stale", "run": run.id})
        except UnusableRunError as error:
            self._fail(claimed, str(error))
        except Exception as error:  # noqa: BLE001 - noted in SQL, and logged
            self._put_off(claimed, error)

    def _give_up(self, claimed: ClaimedRun, reason: str) -> None:
        self._fail(claimed, f"not done in {MOST_ATTEMPTS} attempts; the last time: {reason}")

    def _fail(self, claimed: ClaimedRun, reason: str) -> None:
        if claimed.run.state is RunState.WRITING:
            reason = f"{reason}; job {claimed.run.job_id} has the answers"
        self._work.finish(claimed, RunEnd(RunState.FAILED, reason), self._clock())
        logger.warning(
            "a run of %s failed: %s",
            claimed.schedule_name,
            reason,
            extra={"action": "run_failed", "run": claimed.run.id},
        )

    def _put_off(self, claimed: ClaimedRun, error: Exception) -> None:
        """Try a step again later, or fail the run when it was tried often enough."""
        run = claimed.run
        # The message of an unknown error may repeat a row's content.
        known = isinstance(error, StoreError) or type(error).__module__.startswith("nightjar.")
        reason = str(error) if known else type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            reason = f"{error.filename or 'a file'}: {error.strerror}"
        logger.warning(
            "a step of a run failed: %s",
            reason,
            exc_info=None if known else error,
            extra={"action": "run_put_off", "run": run.id, "attempt": run.attempts},
        )
        if run.attempts >= MOST_ATTEMPTS and not isinstance(error, StoreUnavailableError):
            self._give_up(claimed, reason)
            return
        pause_s = min(LONGEST_PAUSE_S, self._first_pause_s * GROWTH ** (run.attempts - 1))
        retry_at = self._clock() + timedelta(seconds=pause_s)
        self._work.release(claimed, reason=reason, retry_at=retry_at)

    def _beat(self) -> None:
        while not self._stopping.wait(self._settings.heartbeat_s) or self._threads():
            try:
                self._runners.beat(self.owner)
                if self._threads():
                    self._work.beat(self.owner)
            except StoreError as error:
                logger.warning("no sign of life: %s", error, extra={"action": "beat_failed"})
            if self._stopping.is_set():
                time.sleep(self._settings.heartbeat_s)

    def _take_back(self) -> None:
        """Free the steps of processes that are gone, and of threads of this one that are."""
        held = self._work.held()
        self.watched.count()
        now = self.watched.seconds
        self._seen = {one: self._seen.get(one, now) for one in held}
        with self._lock:
            own = set(self._doing)
        for one, since in self._seen.items():
            if one.owner == self.owner:
                is_dead = one.run_id not in own
            else:
                is_still = now - since >= self._settings.worker_dead_after_s
                is_dead = is_still or is_gone(one.owner)
            if is_dead and self._work.take_back(one):
                logger.warning(
                    "a run was left half-way and is taken again",
                    extra={"action": "run_taken_back", "run": one.run_id, "owner": one.owner},
                )


def main() -> None:
    """Run the process until TERM or Ctrl-C; a second one ends it at once, which does no harm."""
    logs.configure()
    logs.name_process("task-runner")
    settings = Settings.read()
    step_back(settings.worker_niceness)
    with closing(open_store(settings)) as store:
        store.ping()
        runner = TaskRunner(store, settings, os.environ)

        def end(number: int, _: FrameType | None) -> None:
            if runner.is_stopping:
                os._exit(128 + number)
            runner.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        logger.info("takes runs of tasks", extra={"action": "tasks_ready"})
        runner.run()


if __name__ == "__main__":
    main()

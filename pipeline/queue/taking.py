"""Ends a worker that takes no messages although some wait for it.

A process may live and yet take no messages: the loop that receives them is stuck, or Celery has
lost count of its free threads. No supervisor sees that from outside, so the worker watches itself.
It is stuck when a thread is idle, messages wait in its queues, and none was taken for a while.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from celery import Celery, signals
from celery.worker import state
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from nightjar.pipeline.queue.live_lane import Consumer
from nightjar.pipeline.settings import Settings

logger = logging.getLogger(__name__)

EXIT_STUCK = 75
"""Status of a worker that ended because it took nothing (EX_TEMPFAIL of sysexits.h)."""

_LOOKS = 6  # in the time after which a worker counts as stuck
_LEAST_S = 0.1
_SHUTDOWN_S = 30.0  # over the time to drain


class Activity:
    """Counts the busy threads of a lane, and notes when its last task began or ended.

    live: Whether it is the lane of single calls; their tasks say so in their arguments.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, live: bool = False) -> None:
        self._clock = clock
        self._live = live
        self._lock = threading.Lock()
        self._busy = 0
        self._changed_at = clock()

    def began(self, kwargs: Mapping[str, object] | None = None, **_: object) -> None:
        """Note that a task with these arguments begins; one of another lane does not count."""
        if self._is_ours(kwargs):
            self._change(1)

    def ended(self, kwargs: Mapping[str, object] | None = None, **_: object) -> None:
        """Note that a task with these arguments has ended."""
        if self._is_ours(kwargs):
            self._change(-1)

    def _is_ours(self, kwargs: Mapping[str, object] | None) -> bool:
        return bool(kwargs and kwargs.get("live")) == self._live

    def idle_s(self, threads: int) -> float:
        """Seconds for which one of `threads` was idle and no task began; 0 if all are busy."""
        with self._lock:
            return 0.0 if self._busy >= threads else self._clock() - self._changed_at

    def _change(self, by: int) -> None:
        with self._lock:
            self._busy += by
            self._changed_at = self._clock()


class TakingWatch:
    """Watches one lane of a worker in a separate thread, and ends it when it is stuck.

    Args:
        waiting: How many messages wait in the lane's queues.
        threads: How many tasks the lane runs at a time.
        stuck_after_s: The worker is stuck when a thread was idle and messages waited for so long.
        end: Ends the worker.
    """

    def __init__(
        self,
        activity: Activity,
        waiting: Callable[[], int],
        threads: int,
        stuck_after_s: float,
        end: Callable[[], None],
    ) -> None:
        self._activity = activity
        self._waiting = waiting
        self._threads = threads
        self._stuck_after_s = stuck_after_s
        self._end = end
        self._waited = 0  # checks in a row that found messages
        self._stop = threading.Event()

    def start(self) -> None:
        """Watch until the worker ends."""
        threading.Thread(target=self._run, name="taking", daemon=True).start()

    def stop(self) -> None:
        """Stop watching: the worker ends in order."""
        self._stop.set()

    def check(self) -> bool:
        """Check once; return whether the worker is stuck."""
        # The broker is asked only where a thread is idle.
        if self._activity.idle_s(self._threads) < self._stuck_after_s / 2:
            self._waited = 0
            return False
        self._waited = self._waited + 1 if self._waiting() else 0
        # Every check of the second half of the time found messages.
        idle_s = self._activity.idle_s(self._threads)
        return self._waited > _LOOKS / 2 and idle_s >= self._stuck_after_s

    def _run(self) -> None:
        while not self._stop.wait(max(_LEAST_S, self._stuck_after_s / _LOOKS)):
            try:
                stuck = self.check()
            except (OperationalError, RedisError, OSError) as error:
                self._waited = 0  # the broker is away: nothing can be taken
                logger.info("broker not asked: %s", error, extra={"action": "taking_not_watched"})
                continue
            if stuck and not self._stop.is_set():
                logger.critical(
                    "stuck: messages have waited for %.0f s while a thread was idle and none was "
                    "taken; the worker ends, to be started again",
                    self._stuck_after_s,
                    extra={"action": "worker_stuck"},
                )
                self._end()
                return


def watch_worker(app: Celery, settings: Settings) -> None:
    """Make every worker of this application watch itself as soon as it is ready."""
    watches: list[TakingWatch] = []

    def begin(sender: object, **_: object) -> None:
        threads = sender.pool.num_processes  # type: ignore[attr-defined]  # Celery's consumer
        lanes = [(False, list(app.amqp.queues.consume_from), threads - Consumer.lane_threads)]
        if Consumer.lane_queues:
            lanes.append((True, [*Consumer.lane_queues], Consumer.lane_threads))
        for live, queues, of_lane in lanes:
            activity = Activity(live=live)
            signals.task_prerun.connect(activity.began, weak=False)
            signals.task_postrun.connect(activity.ended, weak=False)
            watch = TakingWatch(
                activity,
                partial(_waiting, app, queues),
                of_lane,
                settings.worker_stuck_after_s,
                lambda: _end(settings.drain_s + _SHUTDOWN_S),
            )
            watches.append(watch)
            watch.start()

    def stop(**_: object) -> None:
        for watch in watches:
            watch.stop()

    signals.worker_ready.connect(begin, weak=False)
    signals.worker_shutting_down.connect(stop, weak=False)


def _waiting(app: Celery, queues: list[str]) -> int:
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        return sum(channel._size(queue) for queue in queues)


def _end(patience_s: float) -> None:
    """End in order, as after TERM but with another status; at once when that takes too long."""
    signals.worker_shutting_down.send(sender=None, sig="stuck", how="Warm", exitcode=EXIT_STUCK)
    state.should_stop = EXIT_STUCK
    time.sleep(patience_s)
    os._exit(EXIT_STUCK)

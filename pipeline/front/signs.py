"""Signs of life of broker, planner, beat, GPU workers and task runners, for the API.

A thread reads the signs every few seconds, so that `/health` and polls need not wait. A process
lives as long as its counter in SQL moves. This process's monotonic clock decides, so the clocks of
other machines do not matter.
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping

from celery import Celery
from kombu import Connection, Queue
from kombu.exceptions import ChannelError, KombuError
from redis.exceptions import RedisError

from nightjar.jobs.api.health import OK, UNKNOWN
from nightjar.jobs.errors import StoreError
from nightjar.jobs.store import Store
from nightjar.jobs.store.waiting import SWEEPER
from nightjar.pipeline.queue.leadership import PLANNER, PROTOCOL

logger = logging.getLogger(__name__)

READ_EVERY_S = 2.0
BROKER_TIMEOUT_S = 5.0
NO_BROKER = "the broker does not answer; jobs are taken, and start when it is back"
NO_PLANNER = "no planner takes what waits for it; start `nightjar worker plan`"
OLD_PLANNER = (
    "the planner that leads is of an earlier version, and reads no batches; start `nightjar worker "
    "plan` of this version"
)
NO_BEAT = "no ticks wake the planner; start `nightjar beat`"
NO_TASK_RUNNER = (
    "schedules of tasks are there, and nothing runs them; start `nightjar worker tasks`"
)
NO_GPU_WORKER = "no GPU worker gives a sign of life; start `nightjar worker compute`"


class Signs:
    """Watches the deployment inside a `with` block.

    Args:
        store: Holds the counters that GPU workers and the leading planner raise.
        celery: The application whose broker and queues are read.
        dead_after_s: A process is dead when its counter has not moved for so long.
        read_every_s: The time between two readings.
    """

    def __init__(
        self,
        store: Store,
        celery: Celery,
        *,
        dead_after_s: float,
        read_every_s: float = READ_EVERY_S,
    ) -> None:
        self._store = store
        self._celery = celery
        self._dead_after_s = dead_after_s + read_every_s
        self._read_every_s = read_every_s
        self._counters: dict[str, int] = {}
        self._moved_at: dict[str, float] = {}
        self._leader_is_old = False
        self._runners: set[str] = set()
        self._needs_runner = False
        self._began_at = time.monotonic()
        self._broker = UNKNOWN
        self._broker_seen_at = self._began_at
        self._connection: Connection | None = None
        self._backlog = 0
        self._backlog_grew_at: float | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="signs", daemon=True)

    def __enter__(self) -> "Signs":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self._thread.join(BROKER_TIMEOUT_S)

    def parts(self) -> Mapping[str, str]:
        """Return the state of each part: OK, UNKNOWN, or what is wrong and how to correct it."""
        now = time.monotonic()
        broker = self._broker
        if now - self._broker_seen_at > self._dead_after_s + BROKER_TIMEOUT_S:
            broker = NO_BROKER
        planner, beat = self._planner_and_beat(broker, now)
        workers = self._moved_at.keys() - self._runners - {PLANNER}
        parts = {"broker": broker, "planner": planner, "beat": beat}
        parts["gpu_workers"] = self._any_moves(workers, now, NO_GPU_WORKER)
        runners = self._any_moves(self._runners, now, NO_TASK_RUNNER)
        if runners == OK or self._needs_runner:  # most deployments need none
            parts["task_runners"] = runners
        return parts

    def _any_moves(self, names: Collection[str], now: float, missing: str) -> str:
        if any(self._moves(name, now) for name in names):
            return OK
        return UNKNOWN if now - self._began_at < self._dead_after_s else missing

    def _planner_and_beat(self, broker: str, now: float) -> tuple[str, str]:
        """Return the states of planner and clock.

        Both work while the leader's counter moves. Otherwise the messages that wait in the broker
        show which of the two does not work.
        """
        if self._moves(PLANNER, now):
            return OLD_PLANNER if self._leader_is_old else OK, OK
        if broker != OK or now - self._began_at < self._dead_after_s:
            return UNKNOWN, UNKNOWN
        if not self._backlog:
            return UNKNOWN, NO_BEAT
        grew_at = self._backlog_grew_at
        beats = grew_at is not None and now - grew_at < self._dead_after_s
        return NO_PLANNER, OK if beats else UNKNOWN

    def _moves(self, name: str, now: float) -> bool:
        moved_at = self._moved_at.get(name)
        return moved_at is not None and now - moved_at < self._dead_after_s

    def _watch(self) -> None:
        while not self._stopping.is_set():
            try:
                self._read_counters()
            except StoreError as error:  # /health asks the database itself
                logger.warning("signs of life unread: %s", error, extra={"action": "signs_unread"})
            self._check_broker()
            self._stopping.wait(self._read_every_s)
        self._disconnect()

    def _read_counters(self) -> None:
        beats = self._store.heartbeats.recent()
        counters = {beat.owner: beat.counter for beat in beats if beat.owner != SWEEPER}
        if (leader := self._store.leaders.get(PLANNER)) is not None and leader.owner is not None:
            counters[PLANNER] = leader.epoch << 40 | leader.counter
            self._leader_is_old = leader.protocol < PROTOCOL
        runners = {beat.owner: beat.counter for beat in self._store.task_runners.recent()}
        self._needs_runner = self._store.task_runners.are_needed()
        self._runners = set(runners)
        counters |= runners
        now = time.monotonic()
        for name, counter in counters.items():
            if self._counters.get(name, counter) != counter:
                self._moved_at[name] = now
        self._counters = counters
        self._moved_at = {name: at for name, at in self._moved_at.items() if name in counters}

    def _check_broker(self) -> None:
        try:
            backlog = self._messages()
        except (KombuError, RedisError, OSError) as error:
            self._disconnect()
            if self._broker != NO_BROKER:
                kind = type(error).__name__  # not its text: it may hold an address
                logger.warning("broker not seen: %s", kind, extra={"action": "broker_not_seen"})
            self._broker = NO_BROKER
        else:
            if backlog > self._backlog:
                self._backlog_grew_at = time.monotonic()
            self._broker, self._backlog = OK, backlog
        self._broker_seen_at = time.monotonic()

    def _messages(self) -> int:
        """Return how many messages wait for a planner."""
        if self._connection is None:
            options = {
                **self._celery.conf.broker_transport_options,
                "socket_timeout": BROKER_TIMEOUT_S,
                "max_retries": 0,
            }
            self._connection = self._celery.connection_for_read(transport_options=options)
        channel = self._connection.default_channel
        channel.client.ping()
        # This process knows only the planners' queues.
        return sum(_length(queue, channel) for queue in self._celery.conf.task_queues)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.release()
            self._connection = None


def _length(queue: Queue, channel: object) -> int:
    try:
        return int(queue(channel).queue_declare(passive=True).message_count)
    except ChannelError:  # no message was ever sent there, or all were taken
        return 0

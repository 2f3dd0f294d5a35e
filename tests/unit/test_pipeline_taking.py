"""A worker that takes nothing while work waits for it is found to be stuck, and no other is."""

import itertools
import time

import pytest

from nightjar.pipeline.queue.taking import Activity, TakingWatch
from tests.processes import wait_until

STUCK_AFTER_S = 60.0
THREADS = 2


class Worker:
    """A worker whose clock and queues are set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting = 0
        self.asked = 0
        self.activity = Activity(lambda: self.now)
        self.watch = TakingWatch(self.activity, self._waiting, THREADS, STUCK_AFTER_S, lambda: None)

    def _waiting(self) -> int:
        self.asked += 1
        return self.waiting

    def stuck_within(self, seconds: float) -> bool:
        """Look every ten seconds."""
        end = self.now + seconds
        while self.now < end:
            self.now += 10
            if self.watch.check():
                return True
        return False


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_one_that_takes_nothing_while_messages_wait_is_stuck(worker: Worker) -> None:
    worker.waiting = 1
    assert worker.stuck_within(STUCK_AFTER_S)


def test_one_that_has_nothing_to_take_is_not(worker: Worker) -> None:
    assert not worker.stuck_within(10 * STUCK_AFTER_S)
    worker.waiting = 1  # a message that has just come is taken in a moment
    assert not worker.stuck_within(10)


def test_one_whose_threads_are_all_busy_is_not(worker: Worker) -> None:
    worker.waiting = 1
    for _ in range(THREADS):
        worker.activity.began()
    assert not worker.stuck_within(10 * STUCK_AFTER_S)
    worker.activity.ended()
    assert worker.stuck_within(STUCK_AFTER_S)


def test_one_that_takes_now_and_then_is_not_and_asks_nobody(worker: Worker) -> None:
    worker.waiting = 1
    for _ in range(20):
        worker.activity.began()
        worker.activity.ended()
        assert not worker.stuck_within(STUCK_AFTER_S / 3)
    assert worker.asked == 0


def test_each_lane_counts_its_own_tasks() -> None:
    now = 0.0
    jobs, calls = Activity(lambda: now), Activity(lambda: now, live=True)
    call, job = {"micro_batch": 1, "epoch": 0, "live": True}, {"micro_batch": 2, "epoch": 0}
    for activity in (jobs, calls):
        activity.began(kwargs=job)
        activity.began(kwargs=job)
        activity.began(kwargs=call)
    now = 10.0
    assert (jobs.idle_s(2), calls.idle_s(2)) == (0.0, 10.0)
    for activity in (jobs, calls):
        activity.ended(kwargs=call)
    assert calls.idle_s(2) == 0.0
    assert jobs.idle_s(2) == 0.0
    now = 20.0
    assert (jobs.idle_s(2), calls.idle_s(2)) == (0.0, 10.0)


def test_it_looks_six_times_in_the_time_after_which_a_worker_is_stuck() -> None:
    """More often, a message that has just come to an idle worker would count as waiting long."""
    looks: list[float] = []

    def waiting() -> int:
        looks.append(time.monotonic())
        return 0

    moments = itertools.count(0.0, STUCK_AFTER_S)  # idle for long at every look
    activity = Activity(lambda: next(moments))
    watch = TakingWatch(activity, waiting, THREADS, 1.8, lambda: None)
    began = time.monotonic()
    watch.start()
    wait_until("two looks", lambda: len(looks) >= 2, 20)
    watch.stop()
    assert looks[1] - began > 0.55

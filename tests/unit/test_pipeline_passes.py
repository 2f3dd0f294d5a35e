"""Passes: each in its thread, woken, never ended by what a step raises."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from nightjar.jobs.errors import StoreUnavailableError
from nightjar.pipeline.queue.passes import Pass
from tests.processes import wait_until

LONG_S = 3600.0


@contextmanager
def running(one: Pass) -> Iterator[Pass]:
    one.start()
    yield one
    one.stop(5)


def test_it_goes_on_at_once_while_there_is_more_and_then_waits_to_be_woken() -> None:
    pauses = [0.0, 0.0, LONG_S, LONG_S]
    steps: list[float] = []

    def step() -> float:
        steps.append(pauses[len(steps)])
        return steps[-1]

    with running(Pass("p", step, LONG_S)) as one:
        wait_until("three steps", lambda: len(steps) == 3, 5)
        one.wake()
        wait_until("the step that was asked for", lambda: len(steps) == 4, 5)
    assert len(steps) == 4


def test_wakes_during_a_step_are_one_step_more() -> None:
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def step() -> float:
        begun.release()
        go_on.acquire()
        return LONG_S

    with running(Pass("p", step, LONG_S)) as one:
        assert begun.acquire(timeout=5)
        for _ in range(10):
            one.wake()
        go_on.release()
        assert begun.acquire(timeout=5)
        go_on.release()
        assert not begun.acquire(timeout=0.2)
        go_on.release()


def test_wakes_bring_no_step_sooner_than_the_least_pause() -> None:
    begun = threading.Semaphore(0)
    steps: list[float] = []

    def step() -> float:
        steps.append(time.monotonic())
        begun.release()
        return LONG_S

    with running(Pass("p", step, LONG_S, least_s=0.3)) as one:
        for _ in range(3):
            assert begun.acquire(timeout=5)
            one.wake()
    assert all(later - sooner >= 0.3 for sooner, later in pairwise(steps))


def test_the_least_pause_holds_up_neither_more_work_nor_the_end() -> None:
    pauses = iter([0.0, 0.0, LONG_S])
    done = threading.Event()

    def step() -> float:
        pause_s = next(pauses)
        if pause_s:
            done.set()
        return pause_s

    one = Pass("p", step, LONG_S, least_s=LONG_S)
    one.start()
    assert done.wait(5)
    one.stop(5)
    assert "p" not in {thread.name for thread in threading.enumerate()}


class Panic(BaseException):
    """As the tokenizers library raises it."""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("error", "level", "action"),
    [
        (StoreUnavailableError("away"), logging.WARNING, "pass_waits"),
        (OperationalError("away"), logging.WARNING, "pass_waits"),
        (RedisError("away"), logging.WARNING, "pass_waits"),
        (OSError("away"), logging.WARNING, "pass_waits"),
        (RuntimeError(), logging.ERROR, "pass_failed"),
        (Panic(), logging.ERROR, "pass_failed"),
    ],
)
def test_a_step_that_raises_is_tried_again(
    error: BaseException, level: int, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A traceback is written of a fault, and none where the database or the broker is away."""
    steps: list[int] = []

    def step() -> float:
        steps.append(1)
        if len(steps) < 3:
            raise error
        return LONG_S

    with running(Pass("p", step, 0.01)):
        wait_until("the step after the errors", lambda: len(steps) == 3, 5)
    assert [(record.levelno, record.action) for record in caplog.records] == [(level, action)] * 2
    assert ("Traceback" in caplog.text) is (level == logging.ERROR)


def test_a_stop_waits_for_the_step_that_runs() -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def step() -> float:
        began.set()
        may_end.wait(5)
        ended.set()
        return LONG_S

    one = Pass("p", step, LONG_S)
    one.start()
    assert began.wait(5)
    threading.Timer(0.1, may_end.set).start()
    one.stop(5)
    assert ended.is_set()


def test_a_pass_that_was_never_started_can_be_stopped() -> None:
    steps: list[float] = []
    Pass("p", lambda: steps.append(0.0) or LONG_S, LONG_S).stop(5)
    assert steps == []

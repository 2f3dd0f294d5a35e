"""The ticker: at once after a pause, rarely under load, and never one too few."""

import threading
import time
from itertools import pairwise

from kombu.exceptions import OperationalError

from nightjar.gpu_worker.worker.ticker import Ticker
from tests.processes import wait_until


def test_the_first_tick_is_sent_at_once() -> None:
    sent = threading.Event()
    ticker = Ticker(sent.set, every_s=60)
    ticker.tick()
    assert sent.wait(10)
    ticker.close()


def test_many_ends_make_few_ticks() -> None:
    sent: list[float] = []
    ticker = Ticker(lambda: sent.append(time.monotonic()), every_s=0.1)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        ticker.tick()
        time.sleep(0.001)
    ticker.close()
    assert 2 <= len(sent) <= 8
    pauses = [later - earlier for earlier, later in pairwise(sent)]
    assert min(pauses) >= 0.09


def test_an_end_during_the_pause_is_told_after_it() -> None:
    sent: list[float] = []
    ticker = Ticker(lambda: sent.append(time.monotonic()), every_s=0.2)
    ticker.tick()
    wait_until("the first tick", lambda: sent, 10)
    ticker.tick()
    wait_until("the second tick", lambda: len(sent) == 2, 10)
    assert sent[1] - sent[0] >= 0.19
    ticker.close()


def test_nothing_is_sent_without_a_reason() -> None:
    sent: list[int] = []
    ticker = Ticker(lambda: sent.append(1), every_s=0.01)
    time.sleep(0.1)
    ticker.close()
    assert not sent
    assert "ticker" not in {thread.name for thread in threading.enumerate()}


def test_nothing_is_sent_once_it_is_closed() -> None:
    sent: list[int] = []
    ticker = Ticker(lambda: sent.append(1), every_s=60)
    ticker.tick()
    wait_until("the first tick", lambda: sent, 10)
    ticker.tick()
    ticker.close()
    ticker.tick()
    time.sleep(0.05)
    assert len(sent) == 1


def test_closing_waits_for_a_tick_that_is_being_sent() -> None:
    begun, sent = threading.Event(), threading.Event()

    def send() -> None:
        begun.set()
        time.sleep(0.2)
        sent.set()

    ticker = Ticker(send, every_s=60)
    ticker.tick()
    assert begun.wait(10)
    ticker.close()
    assert sent.is_set()


def test_a_broker_that_is_away_does_not_end_it() -> None:
    calls: list[int] = []

    def send() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise OperationalError("nobody there")

    ticker = Ticker(send, every_s=0.01)
    ticker.tick()
    wait_until("the tick that fails", lambda: calls, 10)
    ticker.tick()
    wait_until("the next", lambda: len(calls) == 2, 10)
    ticker.close()

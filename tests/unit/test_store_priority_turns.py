"""Turns: only so many threads at a time, urgent ones first, and a place that is kept for these."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from nightjar.jobs.store.priority_turns import PriorityTurns, TurnTimeoutError

SOON_S = 0.1
PATIENCE_S = 10.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def waiting(
    turns: PriorityTurns, pool: ThreadPoolExecutor, name: str, order: list[str]
) -> Future[None]:
    """A thread that waits for its turn, and says then who it is."""
    begun = threading.Event()

    def run() -> None:
        begun.set()
        with turns.turn(urgent=name == "urgent"):
            order.append(name)

    future = pool.submit(run)
    assert begun.wait(PATIENCE_S)
    with pytest.raises(TimeoutError):
        future.result(SOON_S)
    return future


def test_an_urgent_thread_has_its_turn_first(pool: ThreadPoolExecutor) -> None:
    turns, order = PriorityTurns(), list[str]()
    with turns.turn():
        names = ("ordinary", "ordinary", "urgent", "ordinary")
        threads = [waiting(turns, pool, name, order) for name in names]
        assert order == []
    for thread in threads:
        thread.result(PATIENCE_S)
    assert order == ["urgent", "ordinary", "ordinary", "ordinary"]


def test_so_many_are_in_and_no_more() -> None:
    turns = PriorityTurns(3, kept=1)
    with ExitStack() as inside:
        inside.enter_context(turns.turn(timeout_s=SOON_S))
        inside.enter_context(turns.turn(timeout_s=SOON_S))
        with pytest.raises(TurnTimeoutError), turns.turn(timeout_s=SOON_S):
            pass
        inside.enter_context(turns.turn(urgent=True, timeout_s=SOON_S))
        with pytest.raises(TurnTimeoutError), turns.turn(urgent=True, timeout_s=SOON_S):
            pass
    with turns.turn(timeout_s=SOON_S):  # whoever waited in vain is in nobody's way
        pass


def test_urgent_threads_take_every_place() -> None:
    turns = PriorityTurns(2, kept=1)
    with (
        turns.turn(urgent=True, timeout_s=SOON_S),
        turns.turn(urgent=True, timeout_s=SOON_S),
        pytest.raises(TurnTimeoutError),
        turns.turn(timeout_s=SOON_S),
    ):
        pass


def test_an_ordinary_thread_enters_when_the_urgent_one_has_given_up(
    pool: ThreadPoolExecutor,
) -> None:
    turns, order = PriorityTurns(2), list[str]()
    with turns.turn(urgent=True):
        with turns.turn(urgent=True):
            ordinary = waiting(turns, pool, "ordinary", order)
            with pytest.raises(TurnTimeoutError), turns.turn(urgent=True, timeout_s=SOON_S):
                pass
        ordinary.result(PATIENCE_S)
    assert order == ["ordinary"]


def test_a_turn_that_fails_is_given_on() -> None:
    turns = PriorityTurns()
    for urgent in (True, False):
        with pytest.raises(ZeroDivisionError), turns.turn(urgent=urgent):
            raise ZeroDivisionError
    with turns.turn(timeout_s=SOON_S):
        pass


@pytest.mark.parametrize(("places", "kept"), [(1, 1), (2, 3), (0, 0), (2, -1)])
def test_a_place_must_be_left_for_ordinary_threads(places: int, kept: int) -> None:
    with pytest.raises(ValueError, match=f"{kept} of {places} places"):
        PriorityTurns(places, kept=kept)

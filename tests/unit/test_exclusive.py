"""The lock on the compute process: many share it, a suspect has it alone, suspects first."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from nightjar.gpu_worker.worker.exclusive import ClosedError, SharedOrAlone
from tests.processes import wait_until


class Visitor:
    """A thread that takes the lock and holds it until `leave`."""

    def __init__(self, lock: SharedOrAlone, pool: ThreadPoolExecutor, *, alone: bool) -> None:
        self.inside = threading.Event()
        self._let_go = threading.Event()
        self._visit: Future[None] = pool.submit(self._go, lock, alone)

    def leave(self) -> None:
        self._let_go.set()
        self._visit.result(30)

    def _go(self, lock: SharedOrAlone, alone: bool) -> None:
        with lock.alone() if alone else lock.shared():
            self.inside.set()
            self._let_go.wait(30)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as opened:
        yield opened


def waits(visitor: Visitor) -> bool:
    return not visitor.inside.wait(0.1)


def enters(visitor: Visitor) -> bool:
    return visitor.inside.wait(30)


def test_ordinary_work_is_together(pool: ThreadPoolExecutor) -> None:
    lock = SharedOrAlone()
    first, second = (Visitor(lock, pool, alone=False) for _ in range(2))
    assert enters(first)
    assert enters(second)
    first.leave()
    second.leave()


def test_a_suspect_waits_until_everybody_has_left_and_keeps_others_out(
    pool: ThreadPoolExecutor,
) -> None:
    lock = SharedOrAlone()
    first, second = (Visitor(lock, pool, alone=False) for _ in range(2))
    assert enters(first)
    assert enters(second)
    suspect = Visitor(lock, pool, alone=True)
    first.leave()
    assert waits(suspect)
    second.leave()
    assert enters(suspect)
    other_suspect, ordinary = Visitor(lock, pool, alone=True), Visitor(lock, pool, alone=False)
    assert waits(other_suspect)
    assert waits(ordinary)
    suspect.leave()
    assert enters(other_suspect)
    assert waits(ordinary)
    other_suspect.leave()
    assert enters(ordinary)
    ordinary.leave()


def test_a_suspect_that_waits_goes_before_ordinary_work_that_comes_later(
    pool: ThreadPoolExecutor,
) -> None:
    lock = SharedOrAlone()
    first = Visitor(lock, pool, alone=False)
    assert enters(first)
    suspect = Visitor(lock, pool, alone=True)
    wait_until("the suspect to wait", lambda: lock.waiting)
    later = Visitor(lock, pool, alone=False)
    assert waits(later)
    first.leave()
    assert enters(suspect)
    assert waits(later)
    suspect.leave()
    assert enters(later)
    later.leave()


@pytest.mark.parametrize("alone", [True, False])
def test_an_error_inside_frees_the_lock_again(alone: bool) -> None:
    lock = SharedOrAlone()
    with pytest.raises(ZeroDivisionError), lock.alone() if alone else lock.shared():
        raise ZeroDivisionError
    with lock.alone():
        pass
    with lock.shared():
        assert lock.inside == 1


def test_a_closed_lock_refuses_those_that_wait_and_not_its_holders(
    pool: ThreadPoolExecutor,
) -> None:
    lock = SharedOrAlone()
    inside = Visitor(lock, pool, alone=False)
    assert enters(inside)
    suspect = Visitor(lock, pool, alone=True)
    wait_until("the suspect to wait", lambda: lock.waiting)
    ordinary = Visitor(lock, pool, alone=False)
    assert waits(ordinary)
    lock.close()
    for visitor in (suspect, ordinary):
        with pytest.raises(ClosedError):
            visitor.leave()
        assert not visitor.inside.is_set()
    inside.leave()
    assert lock.waiting == lock.inside == 0


@pytest.mark.parametrize("alone", [True, False])
def test_a_closed_lock_is_refused(alone: bool) -> None:
    lock = SharedOrAlone()
    lock.close()
    with pytest.raises(ClosedError), lock.alone() if alone else lock.shared():
        pass

"""The gate: ordinary work together, a suspect alone, suspects first."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from nightjar.gpu_worker.worker.gate import Gate, GateClosedError
from tests.processes import wait_until


class Visitor:
    """Somebody in a thread of their own who goes through the gate and stays until let go."""

    def __init__(self, gate: Gate, pool: ThreadPoolExecutor, *, alone: bool) -> None:
        self.inside = threading.Event()
        self._let_go = threading.Event()
        self._visit: Future[None] = pool.submit(self._go, gate, alone)

    def leave(self) -> None:
        self._let_go.set()
        self._visit.result(30)

    def _go(self, gate: Gate, alone: bool) -> None:
        with gate.alone() if alone else gate.together():
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
    gate = Gate()
    first, second = (Visitor(gate, pool, alone=False) for _ in range(2))
    assert enters(first)
    assert enters(second)
    first.leave()
    second.leave()


def test_a_suspect_waits_until_everybody_has_left_and_keeps_others_out(
    pool: ThreadPoolExecutor,
) -> None:
    gate = Gate()
    first, second = (Visitor(gate, pool, alone=False) for _ in range(2))
    assert enters(first)
    assert enters(second)
    suspect = Visitor(gate, pool, alone=True)
    first.leave()
    assert waits(suspect)
    second.leave()
    assert enters(suspect)
    other_suspect, ordinary = Visitor(gate, pool, alone=True), Visitor(gate, pool, alone=False)
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
    gate = Gate()
    first = Visitor(gate, pool, alone=False)
    assert enters(first)
    suspect = Visitor(gate, pool, alone=True)
    wait_until("the suspect to wait", lambda: gate.waiting)
    later = Visitor(gate, pool, alone=False)
    assert waits(later)
    first.leave()
    assert enters(suspect)
    assert waits(later)
    suspect.leave()
    assert enters(later)
    later.leave()


@pytest.mark.parametrize("alone", [True, False])
def test_an_error_inside_opens_the_gate_again(alone: bool) -> None:
    gate = Gate()
    with pytest.raises(ZeroDivisionError), gate.alone() if alone else gate.together():
        raise ZeroDivisionError
    with gate.alone():
        pass
    with gate.together():
        assert gate.inside == 1


def test_a_closed_gate_sends_away_who_waits_and_leaves_who_is_inside(
    pool: ThreadPoolExecutor,
) -> None:
    gate = Gate()
    inside = Visitor(gate, pool, alone=False)
    assert enters(inside)
    suspect = Visitor(gate, pool, alone=True)
    wait_until("the suspect to wait", lambda: gate.waiting)
    ordinary = Visitor(gate, pool, alone=False)
    assert waits(ordinary)
    gate.close()
    for visitor in (suspect, ordinary):
        with pytest.raises(GateClosedError):
            visitor.leave()
        assert not visitor.inside.is_set()
    inside.leave()
    assert gate.waiting == gate.inside == 0


@pytest.mark.parametrize("alone", [True, False])
def test_nobody_enters_a_closed_gate(alone: bool) -> None:
    gate = Gate()
    gate.close()
    with pytest.raises(GateClosedError), gate.alone() if alone else gate.together():
        pass

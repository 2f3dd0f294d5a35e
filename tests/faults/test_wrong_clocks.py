"""Wall clocks that are an hour off, and that jump by an hour while the processes run."""

import time
from functools import partial
from pathlib import Path

import pytest

from nightjar.pipeline.queue.waking import CLOCK_MARK
from tests.faults.clocks import WrongClock
from tests.faults.conftest import Note
from tests.faults.load import wait_until_working
from tests.faults.oracle import Answers, judge
from tests.faults.system import BEAT, BROKER, PLANNER, System, running_system

HOUR_S = 3_600
PROCESSES = [PLANNER, BEAT, "worker-0", BROKER]


def give_clocks(folder: Path, clocks: dict[str, WrongClock], system: System) -> None:
    for name in PROCESSES:
        clocks[name] = WrongClock(folder, name)
        service = system.services[name]
        service.environment = {**service.environment, **clocks[name].environment}


def test_beat_ticks_on_when_its_clock_is_set_back(
    sqlite_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    clock = WrongClock(tmp_path, BEAT)
    system = System(tmp_path, sqlite_url, tiny_model)
    beat = system.services[BEAT]
    beat.environment = {**beat.environment, **clock.environment}
    try:
        system.start(BROKER, BEAT)
        wrong_by = []
        for shift in (0, HOUR_S, -HOUR_S, 0):
            clock.shift(shift)
            seen = ticks_waiting(system)
            system.wait_until("ticks", lambda at=seen: ticks_waiting(system) > at + 4, 60)
            wrong_by.append(round((marked_at(system) - time.time()) / HOUR_S))
        assert wrong_by == [0, 1, -1, 0], "the clock was never wrong"
    finally:
        system.close()


@pytest.mark.slow
def test_clocks_that_are_an_hour_off_or_jump_by_one(
    database_url: str, tiny_model: Path, tmp_path: Path, undisturbed: Answers, note: Note
) -> None:
    """Each process alone is an hour ahead, then an hour behind, then right again."""
    clocks: dict[str, WrongClock] = {}
    with running_system(
        tmp_path,
        database_url,
        tiny_model,
        workers=2,  # the second one's clock is right
        prepare=partial(give_clocks, tmp_path, clocks),
    ) as system:
        jumps = 0
        for name in PROCESSES:
            for shift in (HOUR_S, -HOUR_S, 0):
                wait_until_working(system, "worker-0")
                clocks[name].shift(shift)
                jumps += 1
                time.sleep(1)
        for name in PROCESSES:  # a start with a wrong clock is not a jump
            clocks[name].shift(HOUR_S if name != PLANNER else -HOUR_S)
        for name in (PLANNER, BEAT):
            system.restart(name)
        wait_until_working(system, "worker-0", "worker-1")
        system.wait_done()
        for name in (PLANNER, BEAT, "worker-0"):
            assert ahead(system.log(name)), f"the clock of {name} was never wrong"
        verdict = judge(system, undisturbed)
        note(15, "a process's clock an hour ahead, an hour behind", jumps + 1, verdict)
        # Nobody died: no decision but a deadline rests on a wall clock.
        verdict.check(0)
        assert system.restarted.total() == 0, system.restarted


def ticks_waiting(system: System) -> int:
    """Messages that nobody takes, as there is no planner."""
    return sum(system.broker.llen(key) for key in system.broker.scan_iter("plan*"))


def marked_at(system: System) -> int:
    """When beat sent its last tick, by its own clock."""
    return int(system.broker.get(CLOCK_MARK) or 0)


def ahead(log: str) -> bool:
    """Whether a log has lines of several hours: of a clock that jumped."""
    hours = {line[11:13] for line in log.splitlines() if line.startswith("20")}
    return len(hours) > 1

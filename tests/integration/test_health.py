"""`nightjar health`: a part that does not do its work is told from one that does."""

import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service
from nightjar.pipeline.front import health
from nightjar.pipeline.front.health import Part, trouble
from nightjar.pipeline.queue.commands import WorkerRole, beat_command, worker_command
from nightjar.pipeline.settings import Settings
from tests.processes import wait_until


@dataclass(frozen=True)
class Place:
    """A broker, and what runs beside it."""

    folder: Path
    broker: Service
    environment: dict[str, str]

    @property
    def settings(self) -> Settings:
        return Settings.read(broker_url=broker_url(self.folder))

    def start(self, name: str, command: list[str]) -> Service:
        log = self.folder / f"{name}.log"
        service = Service(name, command, log, os.environ | self.environment, self.folder)
        service.start()
        return service


@pytest.fixture
def place(tiny_model: Path, sqlite_url: str) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="nightjar-") as name:
        folder = Path(name)
        broker = Service("broker", broker_command(folder), folder / "log", {}, folder)
        broker.start()
        environment = {
            "NIGHTJAR_BROKER_URL": broker_url(folder),
            "NIGHTJAR_DATABASE_URL": sqlite_url,
            "NIGHTJAR_MODEL": str(tiny_model),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        try:
            wait_for_broker(folder, broker)
            yield Place(folder, broker, environment)
        finally:
            broker.stop(5)


def test_a_planner_answers_and_a_stopped_one_does_not(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_ANSWER_S", 1.0)
    silent = f"no planner of {socket.gethostname()} has answered within 1 s"
    assert trouble(Part.PLANNER, place.settings) == silent
    planner = place.start("planner", worker_command(WorkerRole.PLAN, place.settings))
    try:
        wait_until("the planner", lambda: trouble(Part.PLANNER, place.settings) is None, 60)
        with monkeypatch.context() as patient:
            patient.setattr(health, "_ANSWER_S", 60.0)
            began = time.monotonic()
            assert trouble(Part.PLANNER, place.settings) is None
            assert time.monotonic() - began < 30  # the first answer ends the wait
        assert trouble(Part.WORKER, place.settings) == silent.replace("planner", "GPU worker")
    finally:
        planner.stop(10)
    assert trouble(Part.PLANNER, place.settings) == silent


def test_the_clock_leaves_a_mark_that_ends_with_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trouble(Part.BEAT, place.settings) == "the clock has sent nothing for 30 s"
    beat = place.start("beat", beat_command())
    try:
        wait_until("the clock", lambda: trouble(Part.BEAT, place.settings) is None, 60)
    finally:
        beat.stop(10)
    assert "Traceback" not in beat.log_tail()


def test_a_broker_that_is_away_is_told(place: Place) -> None:
    place.broker.stop(5)
    for part in set(Part) - {Part.TASKS}:  # which is asked for in SQL
        assert "the broker does not answer" in (trouble(part, place.settings) or "")

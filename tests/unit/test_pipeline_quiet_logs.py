"""An idle deployment's log stays as it is; what a tick did, and what fails, is written."""

import logging

import pytest
from celery.app.trace import LOG_FAILURE, LOG_RECEIVED, LOG_SUCCESS

from nightjar.pipeline.queue.quiet_logs import QuietTicks

TICK, PLAN = "nightjar.tick", "nightjar.plan"
QUIET = QuietTicks(frozenset({TICK, "nightjar.sweep"}))


def written(logger: str, text: str, *arguments: object, level: int = logging.INFO) -> bool:
    record = logging.LogRecord(logger, level, "file", 1, text, arguments, None)
    record.getMessage()  # as Celery says it
    return QUIET.filter(record)


def succeeded(name: str, returned: dict[str, object]) -> bool:
    told = {"id": "1", "name": name, "return_value": repr(returned), "runtime": 0.1}
    return written("celery.app.trace", LOG_SUCCESS, told)


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ({"requests": 0, "dispatched": 0}, False),
        ({"requests": 0, "dispatched": 12}, True),
        ({"requests": 10, "dispatched": 0}, True),
        ({"handed_on": 1}, False),
        ({}, False),
    ],
)
def test_a_tick_is_written_if_it_did_something(returned: dict[str, object], shown: bool) -> None:
    assert succeeded(TICK, returned) is shown
    assert succeeded(PLAN, returned)


def test_taking_and_sending_ticks_is_not_written() -> None:
    for name, shown in ((TICK, False), (PLAN, True)):
        said = {"name": name, "id": "1", "args": "", "kwargs": ""}
        assert written("celery.worker.strategy", LOG_RECEIVED, said) is shown
        due = "Scheduler: Sending due task %s (%s)"
        assert written("celery.beat", due, "tick", name) is shown


def test_what_others_say_is_written() -> None:
    assert written("celery.worker.consumer.connection", "Connected to %s", "redis://broker")
    assert written("celery.beat", "Removing corrupted schedule file %s: %s", "schedule", "error")
    assert written("nightjar.pipeline", "leads from epoch %d on", 7)
    assert written("nightjar.pipeline", "a tick of %(name)s", {"name": TICK})


def test_what_fails_is_written() -> None:
    told = {"id": "1", "name": TICK, "exc": "no database", "runtime": 1, "description": "raised"}
    assert written("celery.app.trace", LOG_FAILURE, told, level=logging.ERROR)
    assert written("celery.beat", "beat: Starting...")
    assert written("celery.beat", "Connection error: %s", "refused", level=logging.ERROR)

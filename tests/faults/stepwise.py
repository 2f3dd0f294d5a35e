"""The planner worker, which is killed right before, in and right after each of its steps.

    python -m nightjar.pipeline.queue.celery_command tests.faults.stepwise worker ...

in the place of `nightjar.pipeline.planning.tasks`. NIGHTJAR_TEST_STEPS names a directory: each
step leaves a file there before it kills its process, so that it does so once.
"""

import os
import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from nightjar.jobs.store.bulk import BulkUpdate
from nightjar.jobs.store.planning import Planning
from nightjar.jobs.store.stopping import Stopping
from nightjar.jobs.store.suspects import Suspects
from nightjar.pipeline.planning.tasks import app
from nightjar.pipeline.queue import dispatcher

__all__ = ["STEPS", "app"]

# Where, and what of it.
_WHOLE: list[tuple[Any, str]] = [
    (Planning, "save_plan"),
    (dispatcher, "publish"),
    (Planning, "mark_dispatched"),
    (Suspects, "add_owner"),
    (Planning, "requeue"),
    (Stopping, "expire"),
    (Stopping, "finish"),
]
# Inside a transaction: after its statement, before the commit.
_INSIDE: list[tuple[Any, str, str]] = [
    (BulkUpdate, "run", "planning"),
    (Suspects, "_suspect", "suspecting"),
    (Stopping, "_end_as_stopped", "stopping"),
]
STEPS = [f"{when} {name}" for _, name in _WHOLE for when in ("before", "after")]
STEPS += [f"in {name}" for _, _, name in _INSIDE]


def die_once(step: str) -> None:
    """SIGKILL to this process, unless an earlier one died at this step."""
    try:
        (Path(os.environ["NIGHTJAR_TEST_STEPS"]) / step).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def _around(place: Any, name: str) -> None:
    """Die before the step when it is given work, and after it when it did some."""
    original: Callable[..., Any] = getattr(place, name)

    @wraps(original)
    def stepping(*args: Any, **options: Any) -> Any:
        if has_work := _has_work(args):
            die_once(f"before {name}")
        done = original(*args, **options)
        if has_work and (done is None or done):
            die_once(f"after {name}")
        return done

    setattr(place, name, stepping)


def _has_work(args: tuple[Any, ...]) -> bool:
    """Whether the step would do something: with these messages, or with what is in SQL."""
    if len(args) == 1:  # `expire` alone: it says by its result whether it did anything
        return True
    if isinstance(args[0], Stopping):
        return bool(args[0].being_stopped())
    return bool(args[1])


def _inside(place: Any, name: str, step: str) -> None:
    original: Callable[..., Any] = getattr(place, name)

    @wraps(original)
    def stepping(*args: Any, **options: Any) -> Any:
        done = original(*args, **options)
        die_once(f"in {step}")
        return done

    setattr(place, name, stepping)


if "NIGHTJAR_TEST_STEPS" in os.environ:
    for place_, name_ in _WHOLE:
        _around(place_, name_)
    for place_, name_, step_ in _INSIDE:
        _inside(place_, name_, step_)

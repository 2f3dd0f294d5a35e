"""One process among the ranks of a model: how it begins and how it ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Never

from nightjar import logs
from nightjar.children import die_with_parent
from nightjar.gpu_worker.shards import startup
from nightjar.gpu_worker.shards.activity import Activity
from nightjar.gpu_worker.shards.exits import EXIT_FAILED, EXIT_GROUP_LOST
from nightjar.gpu_worker.shards.startup import StartUp

logger = logging.getLogger(__name__)


class GroupLostError(BaseException):
    """Another rank is gone or late.

    Not an Exception: the ranks are no longer in step, so nothing may go on after it. The process
    leaves, and the launcher starts the group again.
    """


class OutOfStepError(BaseException):
    """This rank failed where the others did not stop; see GroupLostError."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One rank of a group.

    meeting: A file that does not exist yet, where the ranks connect; None for a rank that is alone.
    patience_s: How long a rank waits for the others in one exchange.
    activity: What the launcher is told of this rank.
    """

    rank: int
    ranks: int
    meeting: Path | None
    patience_s: float
    activity: Activity

    @classmethod
    def of(cls, start: StartUp) -> GroupMember:
        """Return the member that a start-up message describes, and begin its signs of life."""
        activity = Activity()
        if start.life is not None:
            activity.give_signs(start.life)
        config = start.config
        return cls(start.rank, config.ranks, start.meeting, config.rank_late_after_s, activity)


def begin() -> tuple[StartUp, GroupMember]:
    """Read the start-up message, and prepare this process for its signals, its logs and its end.

    Raises:
        ValueError: The message cannot be read.
    """
    start = startup.decode(sys.argv[1:])
    live_no_longer_than_the_worker(start.worker)
    member = GroupMember.of(start)
    logs.configure("compute" if start.rank == 0 else f"compute rank {start.rank}")
    return start, member


def live_no_longer_than_the_worker(worker: int | None) -> None:
    """Let this process end with the worker's thread that started it, and not before.

    Ctrl-C in a terminal reaches every process there. The worker then drains, and needs its engine.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(worker)


@contextmanager
def leaving_when_lost() -> Iterator[None]:
    """End the process at once when the group is lost or an error cannot be handled; see `leave`."""
    try:
        yield
    except GroupLostError as error:
        logger.error("%s", error, extra={"action": "group_lost"})  # noqa: TRY400 - no fault here
        leave(EXIT_GROUP_LOST)
    except (Exception, OutOfStepError):
        logger.exception("this process cannot go on", extra={"action": "failed"})
        leave(EXIT_FAILED)


def leave(status: int) -> Never:
    """End this process at once, without the interpreter's shutdown.

    A collective keeps threads. A thread that runs during the shutdown sometimes aborts the process.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

"""One process among the ranks of a model: its place, its signs of life, its end."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Never

from nightjar.children import die_with_parent
from nightjar.gpu_worker.shards.activity import Activity
from nightjar.gpu_worker.shards.exits import EXIT_FAILED, EXIT_GROUP_LOST

logger = logging.getLogger(__name__)

SWITCHES = ("cuda_graphs", "cuda_prefetch", "cuda_small_products", "cuda_fused_heads")
"""Settings that switch a part of the CUDA path off."""


class GroupLostError(BaseException):
    """Another rank is gone or late.

    Not an Exception: nothing may go on after it, since the ranks are no longer in step. The process
    has to leave, and the launcher starts the group again.
    """


class OutOfStepError(BaseException):
    """This rank failed where the others did not stop; see GroupLostError."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank among the others.

    meeting: a file that does not exist yet, where the ranks find each other; None for a rank that
    is alone.
    patience_s: how long a rank waits for the others in one exchange.
    activity: what the launcher is told of this rank.
    """

    rank: int
    ranks: int
    meeting: Path | None
    patience_s: float
    activity: Activity


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments from which `place_of` reads a process's place; without them it is alone."""
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:<number>")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--meeting", type=Path, help="file where the ranks find each other")
    parser.add_argument("--patience-s", type=float, default=0.0, help="longest wait for a rank")
    parser.add_argument("--life", type=int, default=-1, help="file descriptor for signs of life")
    parser.add_argument("--worker", type=int, help="process id of the worker to end with")
    parser.add_argument(
        "--without", action="append", default=[], choices=SWITCHES, help="part of the CUDA path"
    )


def place_of(args: argparse.Namespace) -> Place:
    """The place that was given on the command line; from here on the launcher hears of it."""
    activity = Activity()
    if args.ranks > 1:
        activity.give_signs(args.life)
    return Place(args.rank, args.ranks, args.meeting, args.patience_s, activity)


def live_no_longer_than_the_worker(worker: int | None) -> None:
    """End with the worker's thread that started this process, and no sooner; to be called first.

    Ctrl-C in a terminal reaches the whole group: the worker drains, and needs its engine for it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(worker)


@contextmanager
def leaving_when_lost() -> Iterator[None]:
    """End the process at once where the group is lost or an error leaves no way on: its collective
    keeps threads, see `leave`."""
    try:
        yield
    except GroupLostError as error:
        logger.error("%s", error, extra={"action": "group_lost"})  # noqa: TRY400 - no fault here
        leave(EXIT_GROUP_LOST)
    except (Exception, OutOfStepError):
        logger.exception("this process cannot go on", extra={"action": "failed"})
        leave(EXIT_FAILED)


def leave(status: int) -> Never:
    """End this process at once: a collective keeps threads, and one that still runs when the
    interpreter takes itself down now and then aborts the process."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

"""Sweep: take leases back from silent workers, send lost messages again, end cancellations.

Silence is measured on this process's monotonic clock: a worker's heartbeat is a counter, so
clocks that differ or jump between machines do not matter.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from nightjar.jobs.records import MicroBatchRef
from nightjar.jobs.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one sweep did."""

    released: int
    requeued: int


class Sweeper:
    """Remembers since when each worker and each message has stood still.

    Args:
        store: Where leases and heartbeats are.
        dead_after_s: A worker whose counter stood still for so long loses its leases.
        redispatch_after_s: A message nobody claimed for so long is published again.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        *,
        dead_after_s: float,
        redispatch_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._dead_after_s = dead_after_s
        self._redispatch_after_s = redispatch_after_s
        self._clock = clock
        self._lock = threading.Lock()
        self._beats: dict[Hashable, float] = {}
        self._messages: dict[Hashable, float] = {}

    def sweep(self) -> SweepReport:
        """Look once; safe to run twice at once."""
        with self._lock:
            self._store.finish_cancellations()  # of a canceller that died half-way
            return SweepReport(released=self._release_dead(), requeued=self._requeue_lost())

    def _release_dead(self) -> int:
        beats = self._store.heartbeats()
        silent = self._still(self._beats, [(beat.owner, beat.counter) for beat in beats])
        released = 0
        for beat in beats:
            if silent[beat.owner, beat.counter] >= self._dead_after_s:
                count = self._store.release_owner(beat.owner)
                released += count
                logger.warning(
                    "worker %s is silent: %d micro-batches go to others",
                    beat.owner,
                    count,
                    extra={"action": "release_dead_worker", "owner": beat.owner},
                )
        return released

    def _requeue_lost(self) -> int:
        refs = self._store.dispatched()
        waited = self._still(self._messages, [(ref.id, ref.epoch) for ref in refs])
        lost: list[MicroBatchRef] = [
            ref for ref in refs if waited[ref.id, ref.epoch] >= self._redispatch_after_s
        ]
        for ref in lost:
            del self._messages[ref.id, ref.epoch]
        if lost:
            self._store.requeue(lost)
            logger.warning(
                "%d messages unclaimed for %.0f s: sent again",
                len(lost),
                self._redispatch_after_s,
                extra={"action": "requeue_lost"},
            )
        return len(lost)

    def _still(
        self, seen: dict[Hashable, float], present: Iterable[Hashable]
    ) -> dict[Hashable, float]:
        """Seconds since each present key was first seen; keys that are gone are forgotten."""
        now = self._clock()
        first = {key: seen.get(key, now) for key in present}
        seen.clear()
        seen.update(first)
        return {key: now - since for key, since in first.items()}

"""Sweep: take leases back from silent workers, send lost messages again, end jobs that are due.

For a worker on the same machine, the operating system says whether it is gone
(pipeline/queue/liveness.py). The silence of other workers is measured in the time that this process
has watched them (pipeline/queue/watched_time.py). A heartbeat is a counter, so the clocks of other
machines do not matter. The sweeper first writes a beat of its own. So it learns whether the
database takes the workers' beats.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from nightjar.jobs.file_records import ABANDONED_AFTER_S
from nightjar.jobs.purge_records import PurgeScope
from nightjar.jobs.records import MicroBatchRef
from nightjar.jobs.store import Store
from nightjar.jobs.store.waiting import SWEEPER
from nightjar.jobs.workers import ComputeSeconds, Crash, WorkerHeartbeat
from nightjar.pipeline.queue.liveness import is_gone
from nightjar.pipeline.queue.watched_time import WatchedTime

logger = logging.getLogger(__name__)

PARTITIONS_EVERY_S = 600.0

FindLost = Callable[[Sequence[MicroBatchRef], Sequence[MicroBatchRef]], Sequence[MicroBatchRef]]


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one sweep did."""

    released: int
    requeued: int


class Sweeper:
    """Takes leases back and finds lost messages; remembers when each worker and message last moved.

    Args:
        store: Where leases and heartbeats are.
        dead_after_s: A worker whose counter has stood still for so long loses its leases. The
            requests that it held are suspected of having killed it.
        redispatch_after_s: A message that no worker has claimed for so long is published again.
        longest_gap_s: See `WatchedTime`.
        deaths_allowed: A request that is computed alone fails after so many deaths of its worker.
        keep_calls_s: Single calls that were made so long ago are deleted.
        keep_results_s: Jobs that ended so long ago are purged, unless their tenant has a time of
            its own; None for never.
        purge_only_exported: Only jobs whose results were exported are purged.
        find_lost: Returns the lost messages. It is given all messages that no worker has claimed,
            and those of them that have waited for `redispatch_after_s`, oldest first. By default
            all of the latter are lost.
        clock: Monotonic seconds.
    """

    def __init__(  # noqa: PLR0913 - its limits
        self,
        store: Store,
        *,
        dead_after_s: float,
        redispatch_after_s: float,
        longest_gap_s: float,
        deaths_allowed: int,
        keep_calls_s: float = 3_600.0,
        keep_results_s: float | None = None,
        purge_only_exported: bool = False,
        find_lost: FindLost | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._dead_after_s = dead_after_s
        self._redispatch_after_s = redispatch_after_s
        self._deaths_allowed = deaths_allowed
        self._keep_calls_s = keep_calls_s
        self._kept = PurgeScope(keep_s=keep_results_s, only_exported=purge_only_exported)
        self._find_lost = find_lost or (lambda _, overdue: overdue)
        self._watched = WatchedTime(longest_gap_s, clock)
        self._lock = threading.Lock()
        self._beats: dict[Hashable, float] = {}
        self._messages: dict[Hashable, float] = {}
        self._landings: dict[Hashable, float] = {}
        self._files: dict[Hashable, float] = {}
        self._planners: dict[Hashable, float] = {}
        self._clock = clock
        self._partitions_at = 0.0

    def sweep(self, patience_s: float = math.inf) -> SweepReport:
        """Take leases back, send lost messages again, charge tenants, end jobs, free what is over.

        Args:
            patience_s: Seconds to charge tenants, for jobs that are to end, for files and for jobs
                whose time is over; the next sweep does the rest.

        Raises:
            StoreUnavailableError: The database is away, or takes no writes.
        """
        with self._lock:
            self._store.heartbeats.beat(SWEEPER, ComputeSeconds())
            beats, messages = self._read()
            report = SweepReport(self._release_dead(beats), self._requeue_lost(messages))
            began = time.monotonic()

            def left_s() -> float:
                return max(0.0, patience_s - (time.monotonic() - began))

            self._store.shares.settle(patience_s)
            self._expire_jobs()
            self._end_jobs(patience_s)
            self._purge_calls(left_s())
            self._drop_planners()
            self._drop_landings()
            self._sweep_files(left_s())
            self._make_partitions()
            self._purge_jobs(left_s())
            return report

    def _expire_jobs(self) -> None:
        """Expire jobs whose time to be computed is over."""
        if expired := self._store.stopping.expire():
            logger.info(
                "%d jobs have expired",
                len(expired),
                extra={"action": "expire", "jobs": expired},
            )

    def _end_jobs(self, patience_s: float) -> None:
        """End what waits in stopped jobs, and followers whose leader has ended without them."""
        began = time.monotonic()
        if corrected := self._store.planned_to.correct():
            logger.warning(
                "%d jobs had rows that no planner would have found",
                corrected,
                extra={"action": "planned_to_corrected"},
            )
        self._store.stopping.finish(patience_s)
        self._store.orphans.land(max(0.0, patience_s - (time.monotonic() - began)))

    def _purge_calls(self, patience_s: float) -> None:
        """Delete single calls that were made `keep_calls_s` ago."""
        if purged := self._store.live.purge(self._keep_calls_s, patience_s):
            logger.info("purged %d single calls", purged, extra={"action": "purge_calls"})

    def _drop_landings(self) -> None:
        """Drop the rows of uploads whose process died while the rows landed."""
        landings = self._store.uploads.all()
        still = self._still(self._landings, [(one.name, one.counter) for one in landings])
        for one in landings:
            if still[one.name, one.counter] >= self._dead_after_s:
                dropped = self._store.uploads.drop(one.name)
                logger.warning(
                    "an upload of %d rows was left half-way and is taken away",
                    dropped,
                    extra={"action": "drop_landing", "job_id": one.name},
                )

    def _drop_planners(self) -> None:
        """Give back the rows that a planner had taken when it died."""
        planners = self._store.planners.all()
        still = self._still(self._planners, planners)
        for owner, counter in planners:
            if still[owner, counter] >= self._dead_after_s or is_gone(owner):
                held = self._store.planners.drop(owner, counter)
                logger.info(
                    "the planner %s is gone; %d ranges of rows go to others",
                    owner,
                    held,
                    extra={"action": "drop_planner", "owner": owner},
                )

    def _sweep_files(self, patience_s: float) -> None:
        """Take abandoned uploads of files back, then free files that nobody can see."""
        arriving = self._store.file_sweeping.uploading()
        still = self._still(self._files, arriving)
        for file_id, counter in arriving:
            if still[file_id, counter] < max(ABANDONED_AFTER_S, self._dead_after_s):
                continue
            if self._store.file_sweeping.take_back(file_id, counter):
                logger.warning(
                    "the upload of a file was left half-way and is taken away",
                    extra={"action": "drop_upload", "file_id": file_id},
                )
        self._store.file_sweeping.sweep_files(patience_s)

    def _make_partitions(self) -> None:
        """Make partitions for the next days. One that is missing is made by a submission."""
        if self._clock() >= self._partitions_at:
            self._store.partitions.make_ahead()
            self._partitions_at = self._clock() + PARTITIONS_EVERY_S

    def _purge_jobs(self, patience_s: float) -> None:
        report = self._store.retention.sweep(self._kept, patience_s)
        if report.jobs or report.rows:
            logger.info(
                "purged %d jobs and %d rows",
                report.jobs,
                report.rows,
                extra={"action": "purge_jobs"},
            )

    def watch(self) -> None:
        """Note which workers and messages have moved, and do nothing else.

        A process that takes the lead later then knows who has been silent.
        """
        with self._lock:
            beats, messages = self._read()
            self._silence(beats)
            self._waits(messages)

    def _read(self) -> tuple[Sequence[WorkerHeartbeat], Sequence[MicroBatchRef]]:
        beats = self._store.heartbeats.of_lease_holders()
        messages = self._store.planning.dispatched()
        self._watched.count()
        return beats, messages

    def _silence(self, beats: Sequence[WorkerHeartbeat]) -> dict[Hashable, float]:
        return self._still(self._beats, [(beat.owner, beat.counter) for beat in beats])

    def _waits(self, refs: Sequence[MicroBatchRef]) -> dict[Hashable, float]:
        return self._still(self._messages, [(ref.id, ref.epoch) for ref in refs])

    def _release_dead(self, beats: Sequence[WorkerHeartbeat]) -> int:
        silent = self._silence(beats)
        released = 0
        for beat in beats:
            if silent[beat.owner, beat.counter] >= self._dead_after_s or is_gone(beat.owner):
                reason = f"the worker {beat.owner} died"
                crash = Crash(reason, self._deaths_allowed, of_worker=True)
                count = self._store.suspects.add_owner(beat.owner, crash, beat.counter)
                released += count
                logger.warning(
                    "worker %s is dead: %d micro-batches go to others",
                    beat.owner,
                    count,
                    extra={"action": "release_dead_worker", "owner": beat.owner},
                )
        return released

    def _requeue_lost(self, refs: Sequence[MicroBatchRef]) -> int:
        waited = self._waits(refs)
        overdue = [ref for ref in refs if waited[ref.id, ref.epoch] >= self._redispatch_after_s]
        overdue.sort(key=lambda ref: -waited[ref.id, ref.epoch])
        lost = self._find_lost(refs, overdue) if overdue else []
        for ref in lost:
            del self._messages[ref.id, ref.epoch]
        if lost:
            self._store.planning.requeue(lost)
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
        """Return the seconds since each present key was first seen; forget keys that are gone."""
        first = {key: seen.get(key, self._watched.seconds) for key in present}
        seen.clear()
        seen.update(first)
        return {key: self._watched.seconds - since for key, since in first.items()}

"""Ingest: the leading planner reads the files of new batches, and their rows become jobs.

Several files are read by turns, a part of each. So a small file does not wait for a large one. Rows
are staged while a file is read, and land in one transaction: a process that dies half-way leaves
nothing, and the next leader reads the file again. The job's id is fixed, so it lands once.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from nightjar.jobs.batch_records import Batch
from nightjar.jobs.errors import QuotaError, StoreError, StoreUnavailableError
from nightjar.jobs.model_choice import ConfiguredModels
from nightjar.jobs.records import JobLimits, JsonObject
from nightjar.jobs.store import Store
from nightjar.jobs.store.batch_work import StoppedBatchError
from nightjar.pipeline.planning.reading import Reading, errors_of, file_error

logger = logging.getLogger(__name__)

MOST_OPEN = 4
"""Files that are read at a time; each of them holds a database connection."""

LOOK_EVERY_S = 0.2
_BACK_OFF_S = 1.0  # after the first failure; twice as long after each further one
_LONGEST_BACK_OFF_S = 60.0
_LANDING_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What one step did, and the seconds to the next one; None if nothing is to be read."""

    landed: bool
    pause_s: float | None


class Ingest:
    """Reads the files of batches; used by one thread.

    Args:
        store: Where batches, files and jobs are.
        limits: Of rows, and of rejected rows of a batch that is not strict.
        models: What this planner plans for; batches may name others that are known.
        attempts: Readings that came to no end, in a row, after which a batch fails.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        *,
        limits: JobLimits,
        models: ConfiguredModels,
        attempts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._work = store.batch_work
        self._limits = limits
        self._models = models
        self._attempts = attempts
        self._clock = clock
        self._open: deque[Reading] = deque()
        self._looked_at = -LOOK_EVERY_S
        self._not_before: dict[str, float] = {}  # by job: when to read again
        self._reasons: dict[str, str] = {}  # by job: why it was not read the last time

    def step(self) -> IngestReport:
        """Read a part of one file, the next in turn.

        Raises:
            StoreUnavailableError: The database is away.
        """
        looks = self._is_to_look()
        if looks:
            self._work.end_cancelled()
            self._drop_stopped()
        landed = self._close_landed()
        found = self._open_next() if looks or landed else False
        reading = next((one for one in self._open if not one.is_landing), None)
        if reading is None:
            if found:  # it failed at once; another may wait
                return IngestReport(landed, 0.0)
            now = self._clock()
            waits = [_LANDING_LOOK_S] if self._open else []
            waits += [max(0.0, when - now) for when in self._not_before.values()]
            return IngestReport(landed, min(waits, default=None))
        self._open.remove(reading)
        self._open.append(reading)
        try:
            reading.read_part()
        except BaseException as error:  # noqa: BLE001 - each kind has its consequence
            self._end(reading, error)
        return IngestReport(landed, 0.0)

    def drop(self) -> None:
        """Forget what is being read: another planner leads, or this one ends."""
        while self._open:
            self._give_up(self._open.popleft())

    def _is_to_look(self) -> bool:
        """Whether to look now for batches that came or were cancelled.

        While a file is read, only now and then: a look takes a tenth of the time of a part.
        """
        now = self._clock()
        if self._reads() and now - self._looked_at < LOOK_EVERY_S:
            return False
        self._looked_at = now
        return True

    def _reads(self) -> bool:
        return any(not one.is_landing for one in self._open)

    def _open_next(self) -> bool:
        """Begin the next file, if there is room; whether one waited."""
        now = self._clock()
        self._not_before = {job: when for job, when in self._not_before.items() if when > now}
        if len(self._open) >= MOST_OPEN:
            return False
        busy = {one.batch.tenant for one in self._open}
        skipped = {one.batch.job_id for one in self._open} | self._not_before.keys()
        batch = self._work.next_to_read(skipped, busy)
        if batch is None:
            return False
        attempts = self._work.count_reading(batch.job_id, 1)
        if attempts > self._attempts:
            reason = self._reasons.pop(batch.job_id, "the planner ended while it read the file")
            message = f"could not be read in {self._attempts} attempts; the last time: {reason}"
            self._fail(batch, [file_error("internal_error", message)])
            return True
        try:
            self._open.append(Reading(self._store, batch, self._limits, self._models))
        except QuotaError as error:
            self._fail(batch, [file_error(error.code, str(error))])
        except StoreUnavailableError:
            with suppress(StoreError):
                self._work.count_reading(batch.job_id, -1)
            raise
        except StoreError as error:
            self._put_off(batch, attempts, error)
        return True

    def _drop_stopped(self) -> None:
        """Drop readings of batches that were cancelled, or that another planner has read."""
        if not self._open:
            return
        still = self._work.still_to_read([one.batch.job_id for one in self._open])
        for reading in tuple(self._open):
            if reading.batch.job_id not in still and not reading.is_landing:
                self._open.remove(reading)
                reading.drop()

    def _close_landed(self) -> bool:
        """Forget readings whose rows have landed; whether any has."""
        landed = [one for one in self._open if one.has_landed]
        for reading in landed:
            if reading.error is not None:
                self._end(reading, reading.error)
                continue
            self._open.remove(reading)
            self._reasons.pop(reading.batch.job_id, None)
            logger.info(
                "the file of a batch was read",
                extra={"action": "batch_landed", "job_id": reading.batch.job_id},
            )
        return bool(landed)

    def _end(self, reading: Reading, error: BaseException) -> None:
        """Close a reading that came to no good end."""
        batch = reading.batch
        if isinstance(error, StoreUnavailableError):
            self._open.remove(reading)
            self._give_up(reading)
            raise error
        self._open.remove(reading)
        reading.drop()
        if isinstance(error, StoppedBatchError):
            return
        errors = errors_of(error, strict=batch.strict)
        if errors is None:
            self._put_off(batch, self._work.count_reading(batch.job_id, 0), error)
            return
        self._fail(batch, errors)

    def _give_up(self, reading: Reading) -> None:
        """Drop a reading that is not to be counted as a failure."""
        reading.drop()
        with suppress(StoreError):
            self._work.count_reading(reading.batch.job_id, -1)

    def _fail(self, batch: Batch, errors: Sequence[JsonObject]) -> None:
        if self._work.fail(batch.job_id, errors):
            logger.info(
                "a batch failed: its file cannot be used (%s)",
                errors[0]["code"],
                extra={"action": "batch_failed", "job_id": batch.job_id},
            )

    def _put_off(self, batch: Batch, attempts: int, error: BaseException) -> None:
        pause_s = min(_LONGEST_BACK_OFF_S, _BACK_OFF_S * 2.0 ** (attempts - 1))
        self._not_before[batch.job_id] = self._clock() + pause_s
        # The message of other errors may repeat a request's content.
        told = f": {error}" if isinstance(error, StoreError) else ""
        self._reasons[batch.job_id] = f"{type(error).__name__}{told}"
        logger.error(
            "the file of %s cannot be read; it is tried again in %.0f s",
            batch.id,
            pause_s,
            exc_info=error,
            extra={"action": "ingest_failed", "job_id": batch.job_id},
        )

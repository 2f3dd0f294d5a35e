"""Writes results of micro-batches, also where the database is away for a while."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nightjar.jobs.errors import StoreUnavailableError
from nightjar.jobs.records import ClaimedMicroBatch

logger = logging.getLogger(__name__)

_STORE_RETRY_S = 1.0


class Landing:
    """Repeats writes until they land, and notices those that hang.

    Args:
        hung_after_beats: Heartbeats that may land while results are ready and do not land.
    """

    def __init__(self, hung_after_beats: int) -> None:
        self._hung_after_beats = hung_after_beats
        self._lock = threading.Lock()
        self._beats: Counter[tuple[int, int]] = Counter()  # while results waited to land
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Repeat no write any more: the worker ends."""
        self._given_up.set()

    def count_beat(self) -> None:
        """Note that a heartbeat has landed."""
        with self._lock:
            for key in self._beats:
                self._beats[key] += 1

    def hung(self) -> list[tuple[int, int]]:
        """Return the micro-batches, each with its epoch, whose results hang."""
        with self._lock:
            hung = [key for key, n in self._beats.items() if n >= self._hung_after_beats]
        for micro_batch, _ in hung:
            logger.error(
                "results of micro-batch %d did not land while %d heartbeats did: given back",
                micro_batch,
                self._hung_after_beats,
                extra={"action": "finish_hangs", "micro_batch": micro_batch},
            )
        return hung

    def until_the_database_answers(
        self, batch: ClaimedMicroBatch, write: Callable[[], bool]
    ) -> bool:
        """Write results; repeat where the database is away or full.

        Raises:
            StoreUnavailableError: The worker drains, and its grace period is over.
        """
        with self._landing_of(batch):
            return self._write_until_it_lands(batch, write)

    @contextmanager
    def _landing_of(self, batch: ClaimedMicroBatch) -> Iterator[None]:
        key = batch.id, batch.epoch
        with self._lock:
            self._beats[key] = 0
        try:
            yield
        finally:
            with self._lock:
                del self._beats[key]

    def _write_until_it_lands(self, batch: ClaimedMicroBatch, write: Callable[[], bool]) -> bool:
        while True:
            try:
                return write()
            except StoreUnavailableError as error:
                if self._given_up.is_set():
                    raise
                logger.warning(
                    "results of micro-batch %d wait for the database: %s",
                    batch.id,
                    error,
                    extra={"action": "finish_waits", "micro_batch": batch.id},
                )
                self._given_up.wait(_STORE_RETRY_S)

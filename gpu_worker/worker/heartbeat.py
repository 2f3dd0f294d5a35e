"""The thread that writes a GPU worker's heartbeats."""

import logging
import threading

from nightjar.gpu_worker.worker.worker import GpuWorker
from nightjar.jobs.errors import StoreError

logger = logging.getLogger(__name__)


class Heartbeat:
    """Raises a worker's counter in SQL, so that the sweeper knows that it lives."""

    def __init__(self, worker: GpuWorker, every_s: float) -> None:
        self._worker = worker
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the beat in progress."""
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stop.is_set():
            try:
                self._worker.keep_alive()
            except StoreError as error:
                # The lease may be lost meanwhile; the epoch decides at finish.
                logger.warning("no heartbeat: %s", error, extra={"action": "heartbeat_failed"})
            self._stop.wait(self._every_s)

"""Passes: planning, dispatching, sweeping and sending events, each repeated in its own thread.

A pass never waits for another one. So while a large job is planned, leases are still taken back and
other jobs are dispatched. Messages only wake a pass; several that come while it is busy wake it
once.
"""

import logging
import threading
from collections.abc import Callable

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from nightjar.jobs.errors import StoreUnavailableError

logger = logging.getLogger(__name__)

# The database or the broker is away: not an error of the pass.
_AWAY = (StoreUnavailableError, OperationalError, RedisError, OSError)


class Pass:
    """One kind of work in a thread.

    Args:
        name: What logs and the thread are called by.
        step: Does a bounded part of the work. Returns the seconds until the next step; 0 where
            there is more to do at once.
        retry_s: Seconds until the next step, after a step that raised.
        least_s: Seconds from the end of a step before a wake brings another one. For passes that
            are often woken and seldom have work.
    """

    def __init__(
        self, name: str, step: Callable[[], float], retry_s: float, least_s: float = 0.0
    ) -> None:
        self._name = name
        self._step = step
        self._retry_s = retry_s
        self._least_s = least_s
        self._due = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread and its first step."""
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread for its next step; return at once."""
        self._due.set()

    def stop(self, patience_s: float) -> None:
        """End after the running step; a step that takes too long ends with the process."""
        self._stop.set()
        self._due.set()
        if self._thread.is_alive():
            self._thread.join(patience_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._due.clear()  # before the step: a wake during the step asks for another one
            pause_s = self._step_safely()
            least_s = min(self._least_s, pause_s)  # a step that has more to do is not held up
            if not self._stop.wait(least_s):
                self._due.wait(pause_s - least_s)

    def _step_safely(self) -> float:
        try:
            return self._step()
        except _AWAY as error:
            logger.warning(
                "the pass %s has to wait: %s", self._name, error, extra={"action": "pass_waits"}
            )
        # Also a panic of the tokenizers library, which is no Exception: the thread must survive it.
        except BaseException:
            logger.exception("the pass %s failed", self._name, extra={"action": "pass_failed"})
        return self._retry_s

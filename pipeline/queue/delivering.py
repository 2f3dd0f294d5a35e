"""Delivers events to webhooks: a pass of the planner that leads.

Deliveries are rows in SQL, like all other work. They need no message: the planner looks for due
ones as often as it sweeps, and they go out while the broker is away. Each is sent by one of a few
threads. So a slow receiver holds one or two threads for some seconds, and no pass waits for it.
"""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

from nightjar.jobs.errors import StoreError
from nightjar.jobs.events import Attempt, ClaimedDelivery
from nightjar.jobs.store.deliveries import Deliveries
from nightjar.jobs.webhooks.sender import GONE

logger = logging.getLogger(__name__)

PLACES = 16  # deliveries that are sent at once
PLACES_OF_ONE = 2  # of them to one webhook
# More than an attempt takes with a slow resolver of names. After a crash an event waits so long.
LEASE_S = 120.0
# 5 s, 20 s, 80 s and so on, at most 8 hours: ten attempts within a day.
FIRST_PAUSE_S = 5.0
GROWTH = 4
LONGEST_PAUSE_S = 8 * 3_600.0
MOST_ATTEMPTS = 10
JITTER = 0.2
PRUNE_EVERY_S = 60.0

Send = Callable[[ClaimedDelivery], Attempt]


def pause_s(
    failures: int, asked_s: float | None = None, *, draw: Callable[[], float] = random.random
) -> float:
    """Seconds until the next attempt after so many failures; drawn apart, so that none crowd.

    asked_s: For so long the receiver asks to be left alone. It is believed for LONGEST_PAUSE_S at
        most: a receiver cannot keep its events waiting for ever.
    """
    grown = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * float(GROWTH) ** min(failures - 1, MOST_ATTEMPTS))
    drawn = draw()
    own = grown * (1 - JITTER + 2 * JITTER * drawn)
    if asked_s is None:
        return own
    return max(own, min(asked_s, LONGEST_PAUSE_S) * (1 + JITTER * drawn))


class Delivering:
    """Sends what is due, a bounded number at once.

    Args:
        deliveries: The deliveries in the store.
        send: Sends one event, in bounded time.
        keep_days: Deliveries older than this are deleted.
        idle_s: Seconds until the next look where nothing is due.
        freed: Called when a thread is free again.
        lease_s: A delivery of a process that died is sent again after so long.
    """

    def __init__(
        self,
        deliveries: Deliveries,
        send: Send,
        *,
        keep_days: float,
        idle_s: float,
        freed: Callable[[], None] = lambda: None,
        lease_s: float = LEASE_S,
    ) -> None:
        self._deliveries = deliveries
        self._send = send
        self._keep = timedelta(days=keep_days)
        self._idle_s = idle_s
        self._freed = freed
        self._lease_s = lease_s
        self._threads = ThreadPoolExecutor(PLACES, thread_name_prefix="deliver")
        self._lock = threading.Lock()
        self._sending: Counter[str] = Counter()  # by webhook
        self._pruned_at = -PRUNE_EVERY_S

    def step(self) -> float:
        """Begin to send what is due; returns the seconds until the next step."""
        self._prune()
        with self._lock:
            free = PLACES - self._sending.total()
            busy = [name for name, count in self._sending.items() if count >= PLACES_OF_ONE]
        if not free:
            return self._idle_s
        claimed = self._deliveries.claim(free, self._lease_s, busy)
        for one in claimed:
            with self._lock:
                self._sending[one.webhook_id] += 1
            self._threads.submit(self._deliver, one)
        return 0.0 if claimed else self._idle_s

    def close(self) -> None:
        """Send nothing more that has not begun; what has begun ends with its time-out."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _deliver(self, claimed: ClaimedDelivery) -> None:
        try:
            self._record(claimed, self._attempt(claimed))
        except StoreError as error:  # it is sent again when its lease is over
            logger.warning(
                "the outcome of a delivery is not recorded: %s",
                error,
                extra={"action": "delivery_unrecorded", "delivery_id": claimed.id},
            )
        finally:
            with self._lock:
                self._sending[claimed.webhook_id] -= 1
                self._sending += Counter()  # drops those at 0
            self._freed()

    def _attempt(self, claimed: ClaimedDelivery) -> Attempt:
        try:
            return self._send(claimed)
        except Exception as error:
            logger.exception(
                "a delivery cannot be sent",
                extra={"action": "delivery_broken", "delivery_id": claimed.id},
            )
            return Attempt(None, f"it cannot be sent: {type(error).__name__}")

    def _record(self, claimed: ClaimedDelivery, attempt: Attempt) -> None:
        failures = claimed.failures + (not attempt.delivered)
        is_over = attempt.status == GONE or failures >= MOST_ATTEMPTS
        pause = timedelta(seconds=pause_s(failures or 1, attempt.retry_after_s))
        retry_at = None if is_over else datetime.now(UTC) + pause
        self._deliveries.record(claimed, attempt, retry_at)
        if attempt.status == GONE:
            self._deliveries.disable(claimed.webhook_id, "the receiver answered 410")
        told = "" if attempt.delivered else f": {attempt.reason}"
        logger.log(
            logging.INFO if attempt.delivered else logging.WARNING,
            "event %s at attempt %d%s",
            "delivered" if attempt.delivered else "not delivered",
            claimed.attempts,
            told,
            extra={
                "action": "delivered" if attempt.delivered else "delivery_failed",
                "delivery_id": claimed.id,
                "event_id": claimed.event_id,
                "webhook_id": claimed.webhook_id,
            },
        )

    def _prune(self) -> None:
        if time.monotonic() - self._pruned_at < PRUNE_EVERY_S:
            return
        self._pruned_at = time.monotonic()
        self._deliveries.prune(datetime.now(UTC) - self._keep)

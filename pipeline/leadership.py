"""One planner leads, the others stand by.

Doing the passes twice is safe, since SQL decides what comes of them, and wasteful: two planners
would encode the same requests, two dispatchers publish the same micro-batches. Sweeping is left to
the leader alone, for it takes leases away.
"""

import logging
import threading
import time
from collections.abc import Callable

from nightjar.jobs.records import Leader
from nightjar.jobs.store.leading import Leaders
from nightjar.pipeline.liveness import is_gone

logger = logging.getLogger(__name__)

PLANNER = "planner"


class Leadership:
    """What one process knows of who leads.

    Args:
        leaders: The leaders in the store.
        owner: This process, unlike any other; by a name of `liveness.owner_name` others know at
            once that it is gone.
        dead_after_s: A leader whose counter stood still for so long, while this process looked,
            is replaced by it.
        longest_gap_s: The time between two looks counts at most so much.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        leaders: Leaders,
        owner: str,
        *,
        dead_after_s: float,
        longest_gap_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leaders = leaders
        self._owner = owner
        self._dead_after_s = dead_after_s
        self._longest_gap_s = longest_gap_s
        self._clock = clock
        self._looked_at = clock()
        self._watched_s = 0.0
        self._lock = threading.Lock()
        self._held: Leader | None = None
        self._seen: Leader | None = None
        self._still_since_s = 0.0
        self._moved = False

    @property
    def other_lives(self) -> bool:
        """Whether another process leads and was seen to live. A leader that never moved while
        this process looked may be dead: what is only wasteful need not wait for that."""
        return self._held is None and self._moved

    def may_act(self) -> bool:
        """Whether to plan and dispatch here: this process leads, or no other is known to live.

        Reads the lead again, as it may have been lost while this process was stopped. One that has
        just begun waits until a leader that lives would have moved.
        """
        held = self._held
        if held is None:
            return not self._moved and self._watched_s >= self._longest_gap_s
        now = self._leaders.get(PLANNER)
        return now is not None and (now.owner, now.epoch) == (held.owner, held.epoch)

    def look(self) -> bool:
        """Renew the lead, take it, or watch who has it; whether this process leads now."""
        with self._lock:
            now = self._clock()
            self._watched_s += min(now - self._looked_at, self._longest_gap_s)
            self._looked_at = now
            if self._held is not None and self._leaders.renew(self._held):
                return True
            self._held = None
            return self._watch()

    def resign(self) -> None:
        """The process ends: another may lead at once."""
        with self._lock:
            held, self._held = self._held, None
            if held is not None:
                self._leaders.resign(held)

    def _watch(self) -> bool:
        seen = self._leaders.get(PLANNER)
        if seen is None or seen.owner is None:
            return self._take(seen)
        if seen != self._seen:
            self._moved = self._seen is not None
            self._seen, self._still_since_s = seen, self._watched_s
        silent_s = self._watched_s - self._still_since_s
        if silent_s < self._dead_after_s and not is_gone(seen.owner):
            return False
        self._moved = False
        return self._take(seen)

    def _take(self, seen: Leader | None) -> bool:
        self._held = self._leaders.take(PLANNER, self._owner, seen)
        if self._held is None:
            return False
        self._seen, self._moved = None, False
        logger.info(
            "leads from epoch %d on",
            self._held.epoch,
            extra={"action": "leads", "owner": self._owner, "epoch": self._held.epoch},
        )
        return True

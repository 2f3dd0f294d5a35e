"""One planner leads, the others stand by.

Doing the passes twice is safe, since SQL decides what comes of them. It is wasteful: two planners
would encode the same requests, and two dispatchers publish the same micro-batches. Only the leader
sweeps, because a sweep takes leases away.
"""

import logging
import threading
import time
from collections.abc import Callable

from nightjar.jobs.records import Leader
from nightjar.jobs.store.leading import Leaders
from nightjar.pipeline.queue.liveness import is_gone
from nightjar.pipeline.queue.watched_time import WatchedTime

logger = logging.getLogger(__name__)

PLANNER = "planner"


class Leadership:
    """What one process knows of who leads.

    Args:
        leaders: The leaders in the store.
        owner: Name of this process, unlike any other. Where it comes from `liveness.owner_name`,
            others know at once when this process is gone.
        dead_after_s: A leader whose counter has stood still for so long, while this process
            looked, is replaced by this process.
        longest_gap_s: See `WatchedTime`.
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
        self._watched = WatchedTime(longest_gap_s, clock)
        self._lock = threading.Lock()
        self._held: Leader | None = None
        self._seen: Leader | None = None
        self._still_since_s = 0.0
        self._moved = False

    @property
    def other_lives(self) -> bool:
        """Whether another process leads and was seen to live.

        A leader that never moved while this process looked may be dead. Passes that are only
        wasteful when done twice do not wait for it.
        """
        return self._held is None and self._moved

    def may_act(self) -> bool:
        """Whether to plan and dispatch here: this process leads, or no other is known to live.

        Reads the lead again, because it may have been lost while this process was stopped. A
        process that has just begun waits until a leader that lives would have moved.
        """
        held = self._held
        if held is None:
            return not self._moved and self._watched.seconds >= self._longest_gap_s
        now = self._leaders.get(PLANNER)
        return now is not None and (now.owner, now.epoch) == (held.owner, held.epoch)

    def check(self) -> bool:
        """Renew the lead, take it, or watch who has it; return whether this process leads now."""
        with self._lock:
            self._watched.count()
            if self._held is not None and self._leaders.renew(self._held):
                return True
            self._held = None
            return self._watch()

    def resign(self) -> None:
        """Give the lead up, because this process ends: another may lead at once."""
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
            self._seen, self._still_since_s = seen, self._watched.seconds
        silent_s = self._watched.seconds - self._still_since_s
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

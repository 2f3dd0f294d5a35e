"""One planner leads; the others plan beside it.

Two planners that dispatch at once do no harm, because SQL decides what counts. But they publish the
same micro-batches twice. Only the leader sweeps, because a sweep takes leases away.

During an upgrade a planner of the version before may lead. It would leave work undone that it does
not know, such as the files of batches. So a newer planner takes the lead from it.
"""

import logging
import threading
import time
from collections.abc import Callable

from nightjar.jobs.store.leading import Leaders
from nightjar.jobs.workers import Leader
from nightjar.pipeline.queue.liveness import is_gone
from nightjar.pipeline.queue.watched_time import WatchedTime

logger = logging.getLogger(__name__)

PLANNER = "planner"
PROTOCOL = 2
"""What planners of this version can do: 1 is to read the files of batches and send webhooks, 2 to
run schedules.

Raise it when older planners would leave work undone.
"""


class Leadership:
    """Takes, renews and watches the lead for one process.

    Args:
        leaders: The leaders in the store.
        owner: Unique name of this process. With a name of `liveness.owner_name`, other processes
            know at once when this one is gone.
        dead_after_s: This process replaces a leader whose counter has not moved for so long, in
            the time that this process has watched.
        longest_gap_s: See `WatchedTime`.
        trusted_s: `may_act` reads the lead anew after so many seconds. Several passes ask, many
            times a second; a chunk of work takes longer than this.
        clock: Monotonic seconds.
        protocol: What this process can do. It replaces a leader that can do less at once.
    """

    def __init__(
        self,
        leaders: Leaders,
        owner: str,
        *,
        dead_after_s: float,
        longest_gap_s: float,
        trusted_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        protocol: int = PROTOCOL,
    ) -> None:
        self._leaders = leaders
        self._protocol = protocol
        self._owner = owner
        self._dead_after_s = dead_after_s
        self._longest_gap_s = longest_gap_s
        self._trusted_s = trusted_s
        self._clock = clock
        self._confirmed: tuple[Leader, float] | None = None
        self._watched = WatchedTime(longest_gap_s, clock)
        self._lock = threading.Lock()
        self._held: Leader | None = None
        self._seen: Leader | None = None
        self._still_since_s = 0.0
        self._moved = False

    @property
    def other_lives(self) -> bool:
        """Whether another process leads and was seen to live.

        A leader that has not moved since this process began to watch may be dead. Planning and
        dispatching do not wait for it.
        """
        return self._held is None and self._moved

    @property
    def other(self) -> str | None:
        """The name of another process that leads and was seen to live."""
        return self._seen.owner if self.other_lives and self._seen is not None else None

    def may_act(self) -> bool:
        """Whether to dispatch here: this process leads, or no other is known to live.

        Reads the lead again after `trusted_s`, because it may have been lost while this process
        was stopped. A new process waits for as long as a living leader may take to move its
        counter.
        """
        held = self._held
        if held is None:
            return not self._moved and self._watched.seconds >= self._longest_gap_s
        confirmed, began_s = self._confirmed, self._clock()
        if confirmed is not None:
            leader, at_s = confirmed
            if leader is held and began_s - at_s < self._trusted_s:
                return True
        now = self._leaders.get(PLANNER)
        if now is None or (now.owner, now.epoch) != (held.owner, held.epoch):
            return False
        self._confirmed = held, began_s
        return True

    def check(self) -> bool:
        """Renew the lead, take it, or watch its holder; return whether this process leads now."""
        with self._lock:
            self._watched.count()
            if self._held is not None and self._leaders.renew(self._held):
                return True
            self._held = None
            return self._watch()

    def resign(self) -> None:
        """Give the lead up when this process ends, so that another takes it at once."""
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
        is_replaced = is_gone(seen.owner) or seen.protocol < self._protocol
        if silent_s < self._dead_after_s and not is_replaced:
            return False
        self._moved = False
        return self._take(seen)

    def _take(self, seen: Leader | None) -> bool:
        self._held = self._leaders.take(PLANNER, self._owner, seen, self._protocol)
        if self._held is None:
            return False
        self._seen, self._moved = None, False
        logger.info(
            "leads from epoch %d on",
            self._held.epoch,
            extra={"action": "leads", "owner": self._owner, "epoch": self._held.epoch},
        )
        return True

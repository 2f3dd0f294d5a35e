"""Requests a minute: one token bucket for each tenant, in this process's memory.

A bucket holds a minute's requests and is refilled evenly. Several API processes have buckets of
their own: together they let through the limit times their number. All calls come from the event
loop's thread, so there is no lock.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MOST_BUCKETS = 10_000


@dataclass(frozen=True, slots=True)
class Allowance:
    """Whether a request may go on, and what is left.

    Attributes:
        limit: Requests a minute.
        remaining: Requests that may follow at once.
        reset_s: Until the bucket is full again.
        retry_after_s: Until one more request is let through; 0 if this one is.
    """

    limit: int
    remaining: int
    reset_s: float
    retry_after_s: float

    def headers(self) -> Mapping[str, str]:
        """The headers of the answer, as OpenAI names them."""
        told = {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.remaining),
            "x-ratelimit-reset-requests": f"{math.ceil(self.reset_s)}s",
        }
        if self.retry_after_s:
            told["retry-after"] = str(math.ceil(self.retry_after_s))
            told["retry-after-ms"] = str(math.ceil(self.retry_after_s * 1_000))
        return told


class TokenBucket:
    """Lets `limit` requests through at once, and then `limit` more a `period_s`."""

    def __init__(self, limit: int, period_s: float, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._rate = limit / period_s
        self._clock = clock
        self._left = float(limit)
        self._seen_at = clock()

    def take(self) -> Allowance:
        """Take one request out of the bucket, if there is one."""
        now = self._clock()
        self._left = min(self.limit, self._left + (now - self._seen_at) * self._rate)
        self._seen_at = now
        if self.limit == 0:
            return Allowance(0, 0, 0.0, 60.0)
        retry_after_s = 0.0
        if self._left >= 1:
            self._left -= 1
        else:
            retry_after_s = (1 - self._left) / self._rate
        reset_s = (self.limit - self._left) / self._rate
        return Allowance(self.limit, int(self._left), reset_s, retry_after_s)


class RateLimits:
    """The buckets by tenant; the one that was used longest ago makes room for a new one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, tenant: str, requests_a_minute: int) -> Allowance:
        """Count a request of the tenant; a limit that has changed begins with a full bucket."""
        bucket = self._buckets.get(tenant)
        if bucket is None or bucket.limit != requests_a_minute:
            bucket = self._buckets[tenant] = TokenBucket(requests_a_minute, 60.0, self._clock)
        self._buckets.move_to_end(tenant)
        while len(self._buckets) > MOST_BUCKETS:
            self._buckets.popitem(last=False)
        return bucket.take()

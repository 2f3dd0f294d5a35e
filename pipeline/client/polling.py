"""Waiting for something of the API to be over: it is asked for again and again."""

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from nightjar.pipeline.client.errors import WaitTimeoutError
from nightjar.pipeline.client.steps import Pause, Steps

_FIRST_POLL_S, _LONGEST_POLL_S, _POLL_GROWTH = 0.1, 2.0, 1.5


class Ending(Protocol):
    """What has an end."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""


Watched = TypeVar("Watched", bound=Ending)


def until_over(
    ask: Callable[[], Steps[Watched]],
    timeout_s: float | None,
    told: Callable[[Watched], object],
    late: Callable[[Watched], str],
) -> Steps[Watched]:
    """Ask until the answer is over, and return it.

    Args:
        ask: Asks once.
        timeout_s: None means for ever.
        told: Called with each answer.
        late: The message of the error.

    Raises:
        WaitTimeoutError: It is not over in time.
    """
    ends_at = None if timeout_s is None else time.monotonic() + timeout_s
    poll_s = _FIRST_POLL_S
    while True:
        found = yield from ask()
        told(found)
        if found.is_over:
            return found
        left_s = _LONGEST_POLL_S if ends_at is None else ends_at - time.monotonic()
        if left_s <= 0:
            raise WaitTimeoutError(f"{late(found)}; it goes on")
        yield Pause(min(poll_s, left_s))
        poll_s = min(_LONGEST_POLL_S, poll_s * _POLL_GROWTH)

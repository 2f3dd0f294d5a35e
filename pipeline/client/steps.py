"""What a client does, one step at a time, without input or output of its own.

An operation is a generator. It yields calls to send and pauses to make, and it is sent the
answer of each call. `Client` takes the steps with a blocking transport and
`AsyncClient` with an asynchronous one, so that all but input and output is written once.
"""

import logging
import random
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from nightjar.jobs.records import JsonObject
from nightjar.pipeline.client.errors import RefusedError, UnreachableError
from nightjar.pipeline.client.uploads import Upload

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

_FIRST_BACK_OFF_S = 0.5
_LONGEST_BACK_OFF_S = 8.0
LONGEST_WAIT_S = 60.0
"""The API may ask to wait for so long in all before a call is sent again."""
_LONG_S = 5.0  # somebody may wonder why nothing happens
PASSING = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)
"""Statuses of an API that is away for a moment."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request to the API.

    `Asking.ask` may send it again, so it must have the same effect twice as once. A call that has
    not is asked with no retries.
    """

    method: str
    path: str
    query: Mapping[str, str | int] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    upload: Upload | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """So many seconds to wait."""

    seconds: float


Steps = Generator[Call | Pause, Any, Value]
"""Yields calls and pauses. The `httpx.Response` of a call is sent in, or its error is thrown in."""


@dataclass(frozen=True, slots=True)
class Asking:
    """How calls are sent: the API's address, for messages, and how often a call is tried again."""

    api_url: str
    retries: int

    def ask(self, call: Call, longest_wait_s: float = LONGEST_WAIT_S) -> Steps[JsonObject]:
        """Send a call until it is answered, and return the answer.

        A call is sent again where the connection broke or the API is away for a moment. It is
        sent again, too, where the tenant has sent too many and the API says how long to wait.
        All pauses together last `longest_wait_s` at most.

        Raises:
            RefusedError: The API refuses the call.
            UnreachableError: It cannot be reached, or what answers is not the API.
        """
        url = f"{self.api_url}{call.path}"
        tried, waited_s = 0, 0.0
        while True:
            try:
                response: httpx.Response = yield call
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                is_passing = isinstance(error, httpx.TransportError) and not isinstance(
                    error, httpx.UnsupportedProtocol
                )
                if not is_passing or tried == self.retries:
                    said = str(error) or type(error).__name__
                    message = f"{call.method} {url}: {said}; is `nightjar api` there?"
                    raise UnreachableError(message) from error
                wait_s = back_off_s(tried)
                tried += 1
            else:
                told_s = _told_s(response)
                if told_s is not None and waited_s + told_s <= longest_wait_s:
                    waited_s += told_s
                    wait_s = told_s
                    if told_s >= _LONG_S:
                        logger.warning(
                            "the API asks to wait %.0f s before %s %s is sent again",
                            *(told_s, call.method, call.path),
                        )
                elif response.status_code in PASSING and tried < self.retries:
                    wait_s = back_off_s(tried)
                    tried += 1
                else:
                    return _read(call, url, response)
            yield Pause(wait_s)


def back_off_s(tried: int) -> float:
    """Return a longer pause after each try; random, so that many clients do not come at once."""
    longest = min(_LONGEST_BACK_OFF_S, _FIRST_BACK_OFF_S * 2.0**tried)
    return longest * random.uniform(0.5, 1.0)


def _told_s(response: httpx.Response) -> float | None:
    """Return how long the API asks to wait; None if it does not."""
    is_limited = response.status_code == httpx.codes.TOO_MANY_REQUESTS
    if not is_limited or response.headers.get("x-should-retry") == "false":
        return None
    for name, each_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        told = response.headers.get(name, "")
        if told.isascii() and told.isdecimal():
            return int(told[:12]) * each_s
    return None


def _read(call: Call, url: str, response: httpx.Response) -> JsonObject:
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        status = f"{response.status_code} {response.reason_phrase}"
        raise UnreachableError(
            f"{call.method} {url}: {status}, which is no answer of Nightjar's API"
        )
    if response.is_error:
        raise _refusal(call, response.status_code, answer)
    return answer


def _refusal(call: Call, status: int, answer: JsonObject) -> RefusedError:
    said = answer.get("error") or answer.get("detail") or answer
    error = said if isinstance(said, dict) else {"message": said}
    message = error.get("message", said)
    if status == httpx.codes.UNAUTHORIZED:
        message = f"{message}; give api_key, or set NIGHTJAR_API_KEY, which commands send"
    told = f"{call.method} {call.path}: {status}: {message}"
    return RefusedError(told, status, error.get("code"), error.get("param"))

"""The body of an upload as it arrives: how long it may be, and how slowly it may come."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from fastapi import Request
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from nightjar.jobs.errors import JobError

CROWDED_RATE = 16  # so many times the least rate is needed while others wait


class RefusedRequestError(JobError):
    """A request that the API refuses, with its HTTP status.

    retry_after_s: When to send it again; the answer's header Retry-After.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        *,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


MayStore = Callable[[str, int], bool]
"""Whether a tenant may store so many bytes more. Called in a thread; it may ask the database."""


def may_store_any(tenant: str, size: int) -> bool:
    """Allow any number of bytes: there are no quotas."""
    return True


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """How long a body may be, how many rows it may have, and how slowly it may come.

    The rate counts the time in which the sender kept us waiting, once that is `stalled_after_s`.
    may_store: Asked before each part of a file is stored.
    """

    max_bytes: int = 1024**3
    stalled_after_s: float = 60.0  # without a byte
    least_bytes_per_s: float = 4_096.0
    deadline_s: float = 3_600.0  # for the whole body
    max_rows: int = 5_000_000
    max_rejected: int = 10_000
    place_wait_s: float = 60.0  # in vain, while other uploads hold all places
    file_lifetime_s: float = 30 * 86_400.0  # of a file whose upload names none
    may_store: MayStore = may_store_any


def refuse_compressed(headers: Headers, what: str) -> None:
    """Raise RefusedRequestError for a body with a Content-Encoding; `what` is to be sent plain."""
    if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        message = f"compressed bodies are not taken; send {what} without a Content-Encoding"
        raise RefusedRequestError(415, "unsupported_encoding", message, "Content-Encoding")


def announced_bytes(headers: Headers) -> int:
    """The length of the body, as its sender says; 0 if it says nothing."""
    length = headers.get("content-length", "")
    return int(length[:20]) if length.isascii() and length.isdecimal() else 0


def refuse_too_large(headers: Headers, limits: UploadLimits) -> None:
    """Raise RefusedRequestError for a body that is longer than allowed, as its sender says."""
    if announced_bytes(headers) > limits.max_bytes:
        raise too_large(limits)


async def read_body(
    request: Request, limits: UploadLimits, is_crowded: Callable[[], bool] = lambda: False
) -> AsyncIterator[bytes]:
    """The body as it arrives.

    Raises:
        RefusedRequestError: It is too long, too slow, stalls or breaks. While `is_crowded`, the
            least rate is CROWDED_RATE times the limits' one: the place is given to another.
    """
    received, waited_s = 0, 0.0
    ends_at = time.monotonic() + limits.deadline_s
    stream = aiter(request.stream())
    try:
        while True:
            asked_at = time.monotonic()
            async with asyncio.timeout(min(limits.stalled_after_s, ends_at - asked_at)):
                chunk = await anext(stream, None)
            if chunk is None:
                return
            arrived_at = time.monotonic()
            waited_s += arrived_at - asked_at
            received += len(chunk)
            if received > limits.max_bytes:
                raise too_large(limits)
            _check_rate(received, waited_s, limits, is_crowded)
            yield chunk
    except TimeoutError as error:
        raise _too_late(limits, ends_at) from error
    except ClientDisconnect as error:
        raise RefusedRequestError(400, "upload_broken_off", "the upload broke off") from error


def _check_rate(
    received: int, waited_s: float, limits: UploadLimits, is_crowded: Callable[[], bool]
) -> None:
    if waited_s < limits.stalled_after_s:
        return
    least = limits.least_bytes_per_s
    needed = least * CROWDED_RATE if is_crowded() else least
    if received >= needed * waited_s:
        return
    raise RefusedRequestError(
        408,
        "upload_too_slow",
        f"the upload came at {received / waited_s:.0f} bytes a second; at least {least:.0f} are "
        f"needed, and {least * CROWDED_RATE:.0f} while other uploads wait",
    )


def _too_late(limits: UploadLimits, ends_at: float) -> RefusedRequestError:
    if time.monotonic() < ends_at:
        return RefusedRequestError(408, "upload_stalled", "the upload stalled; send it again")
    message = f"the upload took longer than {limits.deadline_s:.0f} s; split it into several"
    return RefusedRequestError(408, "upload_too_slow", message)


def too_large(limits: UploadLimits) -> RefusedRequestError:
    """The refusal of a body that is longer than allowed."""
    message = f"the upload is longer than {limits.max_bytes} bytes; split it into several"
    return RefusedRequestError(413, "upload_too_large", message)

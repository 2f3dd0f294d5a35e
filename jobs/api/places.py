"""Places for uploads: how many are taken at once, and the pieces in which a body is read."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request

from nightjar.jobs.api.body import RefusedRequestError, UploadLimits, read_body

UPLOADS_AT_ONCE = 4  # that of a job holds a database connection
CROWDED_AFTER_S = 10.0  # somebody has waited for a place for so long
PARSE_BYTES = 256 * 1024  # a trip to a thread is worth so many bytes


class UploadPlaces:
    """The places that uploads of jobs and of files share."""

    def __init__(self, limits: UploadLimits) -> None:
        self._limits = limits
        self._places = asyncio.Semaphore(UPLOADS_AT_ONCE)
        self._waiting_since: dict[object, float] = {}

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold one of the places in the block; raises RefusedRequestError."""
        waiter = object()
        self._waiting_since[waiter] = time.monotonic()
        try:
            async with asyncio.timeout(self._limits.place_wait_s):
                await self._places.acquire()
        except TimeoutError as error:
            raise RefusedRequestError(
                503,
                "uploads_busy",
                f"{UPLOADS_AT_ONCE} uploads are being taken, and none ended in "
                f"{self._limits.place_wait_s:.0f} s; send it again later",
            ) from error
        finally:
            del self._waiting_since[waiter]
        try:
            yield
        finally:
            self._places.release()

    async def pieces(self, request: Request) -> AsyncIterator[bytes]:
        """The body in pieces worth a trip to a thread; at least one, which may be empty."""
        piece = bytearray()
        async for chunk in read_body(request, self._limits, self._is_crowded):
            piece += chunk
            if len(piece) >= PARSE_BYTES:
                yield bytes(piece)
                piece.clear()
        yield bytes(piece)

    def _is_crowded(self) -> bool:
        """Whether somebody has waited for a place for a while."""
        oldest = min(self._waiting_since.values(), default=None)
        return oldest is not None and time.monotonic() - oldest > CROWDED_AFTER_S

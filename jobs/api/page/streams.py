"""Server-sent events: a part of a page, sent again whenever what it shows has changed.

The number of open streams is bounded, in all and for each tenant. A stream asks the store every
POLL_S seconds. It ends when the API ends, when the key is revoked, and after LONGEST_S.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from nightjar.jobs.api.caller import caller_of
from nightjar.jobs.api.page.gate import PageGate
from nightjar.jobs.api.page.rendering import HEADERS, html
from nightjar.jobs.errors import JobError, StoreError

logger = logging.getLogger(__name__)

MOST_STREAMS = 96
MOST_OF_TENANT = 32
POLL_S = 2.0
HEARTBEAT_S = 15.0
LONGEST_S = 3_600.0
_REDRAWN_S = 30.0  # ages are words that time changes
_STEP_S = 0.25  # how soon a stream sees that the API ends
_CHECKED_S = 5.0  # how often a stream looks whether its key still opens the page

Look = Callable[[], Any]
"""Reads what is shown; called in a thread. Two equal values look the same."""
Draw = Callable[[Any], str]
"""Makes HTML of what was read."""


class Streams:
    """The open streams of this process.

    is_ending: Whether the API has been told to end; whoever runs the server sets it.
    """

    def __init__(self, gate: PageGate) -> None:
        self._gate = gate
        self._open: Counter[str] = Counter()
        self.is_ending: Callable[[], bool] = lambda: False

    def answer(self, request: Request, look: Look, draw: Draw) -> Response:
        """A stream of what `look` and `draw` show; where too many are open, that once."""
        tenant = caller_of(request).tenant
        crowded = self._open.total() >= MOST_STREAMS or self._open[tenant] >= MOST_OF_TENANT
        if crowded:
            # Without an event stream the page says that it is not live.
            return html(request, draw(look()))
        headers = HEADERS | {"X-Accel-Buffering": "no"}
        events = self._counted(request, tenant, look, draw)
        return StreamingResponse(events, headers=headers, media_type="text/event-stream")

    async def _counted(
        self, request: Request, tenant: str, look: Look, draw: Draw
    ) -> AsyncIterator[str]:
        self._open[tenant] += 1
        try:
            async for event in self._events(request, look, draw):
                yield event
        finally:
            self._open[tenant] -= 1

    async def _events(self, request: Request, look: Look, draw: Draw) -> AsyncIterator[str]:
        begun = sent_at = drawn_at = checked_at = time.monotonic()
        shown: Any = None
        yield ": open\n\n"
        while time.monotonic() - begun < LONGEST_S:
            moment = time.monotonic()
            if moment - checked_at >= _CHECKED_S:
                checked_at = moment
                if not await self._is_still_in(request):
                    yield "event: signed-out\ndata: \n\n"
                    return
            try:
                seen = await run_in_threadpool(look)
            except StoreError as error:
                logger.warning("a page waits for the database: %s", error)
                seen = shown
            except JobError:
                yield "event: gone\ndata: \n\n"  # the browser loads the page again, which says why
                return
            if seen is not None and (seen != shown or moment - drawn_at >= _REDRAWN_S):
                shown, drawn_at, sent_at = seen, moment, moment
                yield _message(await run_in_threadpool(draw, seen))
            elif moment - sent_at >= HEARTBEAT_S:
                sent_at = moment
                yield ": still here\n\n"
            if not await self._waited(request):
                return

    async def _is_still_in(self, request: Request) -> bool:
        try:
            return await self._gate.is_still_in(request.scope)
        except StoreError:
            return True  # unknown: the next look says it

    async def _waited(self, request: Request) -> bool:
        """Wait for the next look; False if there shall be none."""
        until = time.monotonic() + POLL_S
        while time.monotonic() < until:
            if self.is_ending() or await request.is_disconnected():
                return False
            await asyncio.sleep(_STEP_S)
        return True


def _message(content: str) -> str:
    lines = "".join(f"data: {line}\n" for line in content.splitlines())
    return f"{lines}\n"

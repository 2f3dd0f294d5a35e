"""HTTP requests at fixed moments, from a process of their own that costs little itself.

httpx took 3 to 4 ms of CPU a request, and a full garbage collection stopped the process for 0.1 s.
At 200 requests a second that was most of what was measured. Here requests are bytes on kept
connections, which cost 0.3 ms each, and nothing is collected while the load lasts.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

WARM_UP = 20
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests sent at fixed moments, whatever the answers take."""

    method: str
    url: str
    body: dict[str, object] | None
    a_second: float
    count: int


def send(load: Load) -> list[float]:
    """Send the load from a process of its own; return the latencies, from the planned moments."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(send_here, (load,))


def send_here(load: Load) -> list[float]:
    """Send the load from this process, in which nothing is collected any more."""
    gc.collect()
    gc.freeze()
    gc.disable()
    return asyncio.run(_send_all(load))


async def _send_all(load: Load) -> list[float]:
    connections = _Connections(load)
    for _ in range(WARM_UP):
        await connections.exchange()
    began = time.monotonic() + 0.1

    async def one(number: int) -> float:
        due = began + number / load.a_second
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        await asyncio.wait_for(connections.exchange(), _PATIENCE_S)
        return time.monotonic() - due

    return await asyncio.gather(*map(one, range(load.count)))


class _Connections:
    """Connections that are kept; a new one is opened where none is free."""

    def __init__(self, load: Load) -> None:
        parts = urlsplit(load.url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._address = (parts.hostname, parts.port)
        body = b"" if load.body is None else json.dumps(load.body).encode()
        head = [f"{load.method} {parts.path} HTTP/1.1", f"Host: {parts.netloc}"]
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
        self._request = "\r\n".join(head).encode() + body
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def exchange(self) -> None:
        """Send the request, and read the answer; raises RuntimeError unless it is a success."""
        reader, writer = self._kept() or await self._open()
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
        if not head.startswith(b"HTTP/1.1 2"):
            raise RuntimeError(head.decode("latin-1"))
        self._free.append((reader, writer))

    def _kept(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A free connection that the server has not closed: it closes those that are idle."""
        while self._free:
            reader, writer = self._free.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self._address)

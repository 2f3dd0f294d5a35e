"""HTTP requests at fixed moments, from a process of their own that costs little itself.

httpx took 3 to 4 ms of CPU a request, and a full garbage collection stopped the process for 0.1 s.
At 200 requests a second that was most of what was measured. urllib3 on kept connections costs a
tenth of that, and nothing is collected while the load lasts.
"""

import gc
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import urllib3

WARM_UP = 20
_THREADS = 64
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
    """Send the load from a process of its own; return the latencies, from the planned moments.

    Raises:
        RuntimeError: An answer is no success.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_send, (load,))


def _send(load: Load) -> list[float]:
    connections = urllib3.PoolManager(maxsize=_THREADS, timeout=_PATIENCE_S, retries=False)
    gc.collect()
    gc.freeze()
    gc.disable()

    def exchange(due: float) -> float:
        answer = connections.request(load.method, load.url, json=load.body)
        if answer.status // 100 != 2:
            raise RuntimeError(f"{answer.status}: {answer.data.decode()}")
        return time.monotonic() - due

    for _ in range(WARM_UP):
        exchange(time.monotonic())
    began = time.monotonic() + 0.1
    with ThreadPoolExecutor(_THREADS) as threads:
        sent = []
        for number in range(load.count):
            due = began + number / load.a_second
            time.sleep(max(0.0, due - time.monotonic()))
            sent.append(threads.submit(exchange, due))
        return [one.result() for one in sent]

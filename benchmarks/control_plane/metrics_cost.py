"""What metrics cost: the same requests with metrics and without, by turns.

All processes count; one of them has the address, and is read as Prometheus does. Processor time is
compared, as it varies less than the time of a run.
"""

import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.control_plane import nightjar_side
from benchmarks.control_plane.requests import write_jobs
from benchmarks.control_plane.services import deployment, free_port
from benchmarks.writing import Figures

_READ_EVERY_S = 5.0
_KINDS = ("without", "with")


def measure(kind: str, args: Namespace, folder: Path) -> Figures:
    """So many rounds on a database of this kind; each begins with the other turn."""
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in _KINDS}
    for number in range(args.metrics_rounds):
        for name in _KINDS[:: 1 if number % 2 else -1]:
            work = folder / f"{number}-{name}"
            port = free_port()
            settings = {"metrics_address": str(port)} if name == "with" else {}
            with deployment(kind, work, args.model, **settings) as running:
                files = write_jobs(work, args.model, args.requests, args.job_requests)
                with _scraped(port) if settings else nullcontext():
                    turns[name].append(nightjar_side.measure(running, files, args.requests))
    cpu_us = {
        name: [round(sum(one["cpu_us_per_request"].values()), 1) for one in of_kind]
        for name, of_kind in turns.items()
    }
    rates = {name: [one["requests_per_s"] for one in of_kind] for name, of_kind in turns.items()}
    more = [100 * (w / wo - 1) for w, wo in zip(cpu_us["with"], cpu_us["without"], strict=True)]
    return {
        "cpu_us_per_request": cpu_us,
        "requests_per_s": rates,
        "more_cpu_percent": round(median(more), 1),
    }


@contextmanager
def _scraped(port: int) -> Iterator[None]:
    """Read the metrics every few seconds while the block runs. Raises httpx.HTTPError."""
    url = f"http://127.0.0.1:{port}/metrics"
    httpx.get(url).raise_for_status()
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(_READ_EVERY_S):
            httpx.get(url)

    reader = threading.Thread(target=scrape)
    reader.start()
    try:
        yield
    finally:
        ended.set()
        reader.join()

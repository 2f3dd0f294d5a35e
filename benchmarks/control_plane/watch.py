"""What processes take while something runs: memory and processor time; and latencies."""

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

EVERY_S = 1.0
# The processes of `nightjar run`, by what their command lines say.
ROLES = {
    "gpu_worker.compute": "compute",
    "gpu_worker.worker": "gpu_worker",
    "pipeline.planning": "planner",
    "pipeline.queue.clock": "beat",
    "valkey-server": "broker",
    "redis-server": "broker",
}

Families = Mapping[str, Sequence[psutil.Process]]
"""Processes by a name for all of them."""


@dataclass
class Watch:
    """Samples processes while the block runs.

    Args:
        families: Asked for the processes of now.
        gauges: Bytes by name that are sampled along, such as what the broker says it holds.
        shared: Whether each of the processes that share a page has its part of it, or all of it.
    """

    families: Callable[[], Families]
    gauges: Mapping[str, Callable[[], int]] = field(default_factory=dict)
    shared: bool = True
    every_s: float = EVERY_S
    samples: list[dict[str, float]] = field(default_factory=list)
    """MiB by name, one each `every_s`."""
    cpu_s: dict[str, float] = field(default_factory=dict)

    def __enter__(self) -> "Watch":
        self._cpu_before = self._cpu()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        after, before = self._cpu(), self._cpu_before
        self.cpu_s = {name: after[name] - before[name] for name in before.keys() & after.keys()}

    def memory(self) -> dict[str, dict[str, float]]:
        """For each name: its peak, and the peak of the last quarter over that of the second."""
        names = sorted({name for sample in self.samples for name in sample})
        # A name that is not there yet has no values.
        return {name: growth([one[name] for one in self.samples if name in one]) for name in names}

    def _sample(self) -> None:
        while not self._stop.wait(self.every_s):
            resident = {
                name: sum(resident_bytes(process, self.shared) for process in family) / 2**20
                for name, family in self.families().items()
            }
            self.samples.append(resident | {n: held() / 2**20 for n, held in self.gauges.items()})

    def _cpu(self) -> dict[str, float]:
        spent: dict[str, float] = defaultdict(float)
        for name, family in self.families().items():
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    # Children that have ended: PostgreSQL has a process a connection.
                    ended = times.children_user + times.children_system
                    spent[name] += times.user + times.system + ended
        return spent


def families_of(named: Mapping[str, psutil.Process]) -> Families:
    """Each process with those below it, but for what has a name of its own."""
    below: dict[int, list[psutil.Process]] = defaultdict(list)
    pids = {process.pid for process in named.values()}
    for process in psutil.process_iter(["ppid"]):
        if process.pid not in pids:
            below[process.info["ppid"]].append(process)
    families = {name: [root] for name, root in named.items()}
    for family in families.values():
        for process in family:  # grows while it is walked
            family.extend(below[process.pid])
    return families


def nightjar_run(
    source: Path,
    *options: str | Path,
    environment: Mapping[str, str] | None = None,
    shared: bool = True,
) -> tuple[float, Watch, str]:
    """`nightjar run` from start to end: its seconds, what its processes took, what it said.

    shared: as `Watch` has it.

    Raises:
        SystemExit: It failed; the message is what it said.
    """
    said = source.with_suffix(".said.txt")
    command = [sys.executable, "-m", "nightjar", "run", str(source), *map(str, options)]
    with said.open("w", encoding="utf-8") as stream:
        began = time.monotonic()
        root = psutil.Popen(command, env=os.environ | (environment or {}), stderr=stream)

        def families() -> Families:
            by_role: dict[str, list[psutil.Process]] = defaultdict(list, run=[root])
            with suppress(psutil.NoSuchProcess):
                for process in root.children(recursive=True):
                    line = " ".join(process.cmdline())
                    for role in (role for part, role in ROLES.items() if part in line):
                        by_role[role].append(process)
            return by_role

        with Watch(families, shared=shared) as watch:
            status = root.wait()
            seconds = time.monotonic() - began
    text = said.read_text(encoding="utf-8").strip()
    if status:
        raise SystemExit(text)
    return seconds, watch, text


def resident_bytes(process: psutil.Process, shared: bool = True) -> int:
    """Bytes in memory; `shared`: of what it shares its part.

    PostgreSQL's processes share their buffers.  But a process also shares its program with all who
    run it, and its part of that grows when they end: not what a test of growth should see.
    """
    try:
        found = process.memory_full_info() if shared else process.memory_info()
    except psutil.NoSuchProcess:  # a short-lived one, such as a worker of PostgreSQL's autovacuum
        return 0
    return int(getattr(found, "pss", found.rss))


def growth(values: Sequence[float]) -> dict[str, float]:
    """The peak of a series, and how its last quarter compares with its second."""
    quarter = len(values) // 4
    found = {"peak_mib": round(max(values), 1)}
    if quarter:
        second = max(values[quarter : 2 * quarter])
        found["last_over_second_quarter"] = round(max(values[-quarter:]) / second, 3)
    return found


def latencies(seconds: Sequence[float]) -> dict[str, float]:
    """How many there are; the median, the 99th percentile and the longest in milliseconds."""
    p50, p99, longest = np.percentile(seconds, (50, 99, 100), method="higher") * 1e3
    milliseconds = {"p50_ms": p50, "p99_ms": p99, "max_ms": longest}
    return {"count": len(seconds)} | {k: round(float(ms), 1) for k, ms in milliseconds.items()}


def travelled(
    requests: int, started: float, submitted: float, ended: float, watch: Watch
) -> dict[str, Any]:
    """The figures of requests that were sent and computed between two moments."""
    return {
        "requests": requests,
        "seconds": round(ended - started, 2),
        "submit_seconds": round(submitted - started, 2),
        "requests_per_s": round(requests / (ended - started), 1),
        "cpu_us_per_request": {n: round(s / requests * 1e6, 1) for n, s in watch.cpu_s.items()},
        "memory": watch.memory(),
    }

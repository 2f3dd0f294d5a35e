"""What processes take while something runs: memory over time, and processor time."""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """MiB in memory by process name, at one moment; broker_mib is what the broker says it holds."""

    resident_mib: dict[str, float]
    broker_mib: float


@dataclass
class Watch:
    """Looks at processes while the block runs.

    Args:
        processes: By name; a name stands for the process and all below it that have no name.
        broker_bytes: Bytes that the broker holds now.
        shared: Whether each of the processes that share a page has its part of it, or all of it.
    """

    processes: Mapping[str, psutil.Process]
    broker_bytes: Callable[[], int]
    shared: bool = True
    samples: list[Sample] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def __enter__(self) -> "Watch":
        self._cpu_before = self._cpu()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        after = self._cpu()
        self.cpu_s = {name: after[name] - before for name, before in self._cpu_before.items()}

    def memory(self) -> dict[str, dict[str, float]]:
        """For each process: its peak, and the peak of the last quarter over that of the second."""
        series: dict[str, list[float]] = defaultdict(list)
        for sample in self.samples:
            for name, resident in sample.resident_mib.items():
                series[name].append(resident)
        return {name: growth(values) for name, values in sorted(series.items())}

    def _look(self) -> None:
        while not self._stop.wait(EVERY_S):
            resident = {
                name: sum(resident_bytes(process, self.shared) for process in family) / 2**20
                for name, family in self.families().items()
            }
            self.samples.append(Sample(resident, self.broker_bytes() / 2**20))

    def _cpu(self) -> dict[str, float]:
        spent = {}
        for name, family in self.families().items():
            times = [process.cpu_times() for process in family]
            spent[name] = sum(t.user + t.system for t in times)
        return spent

    def families(self) -> dict[str, list[psutil.Process]]:
        """Each process with those below it, but for what has a name of its own."""
        below: dict[int, list[psutil.Process]] = defaultdict(list)
        named = {process.pid for process in self.processes.values()}
        for process in psutil.process_iter(["ppid"]):
            if process.pid not in named:
                below[process.info["ppid"]].append(process)
        families = {}
        for name, root in self.processes.items():
            families[name] = [root]
            for process in families[name]:  # grows while it is walked
                families[name] += below[process.pid]
        return families


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


def growth(values: list[float]) -> dict[str, float]:
    """The peak of a series, and how its last quarter compares with its second."""
    quarter = len(values) // 4
    if not quarter:
        return {"peak_mib": round(max(values), 1)}
    second, last = max(values[quarter : 2 * quarter]), max(values[-quarter:])
    return {"peak_mib": round(max(values), 1), "last_over_second_quarter": round(last / second, 3)}


def travelled(
    requests: int, started: float, submitted: float, ended: float, watch: Watch
) -> dict[str, Any]:
    """The figures of requests that were sent and computed between two moments."""
    spent = {name: round(s / requests * 1e6, 1) for name, s in watch.cpu_s.items()}
    return {
        "requests": requests,
        "seconds": round(ended - started, 2),
        "submit_seconds": round(submitted - started, 2),
        "requests_per_s": round(requests / (ended - started), 1),
        "cpu_us_per_request": spent,
        "memory": watch.memory(),
    }


def percentile(values: list[float], share: float) -> float:
    """The smallest value that `share` of all values do not pass."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

"""Records what this process does. Until `open` nothing is recorded, which costs next to nothing."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

import nightjar
from nightjar.pipeline.metrics import declarations as declared
from nightjar.pipeline.metrics.declarations import Metric

Found = TypeVar("Found")

Sample = tuple[tuple[str, ...], float]
"""The values of a metric's labels in their order, and its value."""

Readings = Iterable[tuple[Metric, Iterable[Sample]]]
_OUTCOMES = ("completed", "failed", "cancelled")
_TOKENS = {
    "prompt": "prompt_tokens",
    "completion": "completion_tokens",
    "requested": "requested_tokens",
    "saved": "saved_tokens",
    "reused": "reused_tokens",
}


class Recorder:
    """The metrics of one process; safe to share between threads.

    registry: What a scrape reads; None while nothing is recorded.
    """

    def __init__(self) -> None:
        self.registry: CollectorRegistry | None = None
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}

    def open(self, process: str) -> CollectorRegistry:
        """Begin to record the metrics of this kind of process, from zero."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each counter, which nobody reads
        registry = CollectorRegistry()
        self._counters, self._histograms = {}, {}
        for metric in declared.ALL:
            if process not in metric.processes:
                continue
            names = tuple(metric.labels)
            if metric.kind == "histogram":
                self._histograms[metric.name] = Histogram(
                    metric.name, metric.help, names, registry=registry, buckets=declared.SECONDS
                )
            elif metric in declared.RECORDED:
                self._counters[metric.name] = Counter(
                    metric.name, metric.help, names, registry=registry
                )
        ProcessCollector(registry=registry)
        info = [((nightjar.__version__, process), 1.0)]
        registry.register(Reader(lambda: [(declared.BUILD, info)]))
        self.registry = registry
        return registry

    def count(self, metric: Metric, *labels: str, by: float = 1) -> None:
        """Raise a counter."""
        counter = self._counters.get(metric.name)
        if counter is not None:
            (counter.labels(*labels) if labels else counter).inc(by)

    def observe(self, metric: Metric, seconds: float, *labels: str) -> None:
        """Add a time to a histogram."""
        histogram = self._histograms.get(metric.name)
        if histogram is not None:
            histogram.labels(*labels).observe(seconds)

    @contextmanager
    def operation(self, name: str) -> Iterator["Timing"]:
        """Time a part of the control plane's work, unless it says that it found nothing to do."""
        started, timing = time.perf_counter(), Timing()
        try:
            yield timing
        finally:
            if timing.counts:
                self.observe(declared.OPERATION, time.perf_counter() - started, name)

    def add_readings(self, read: Callable[[], Readings]) -> None:
        """Let each scrape call `read` for metrics that are counted elsewhere."""
        if self.registry is not None:
            self.registry.register(Reader(read))


class Timing:
    """A time that is being taken; `counts` says whether it is recorded."""

    counts = True

    def found(self, something: Found) -> Found:
        """Return `something`; where that is nothing, the time is not recorded."""
        self.counts = bool(something)
        return something


class Reader:
    """A collector of prometheus-client over numbers that are counted elsewhere."""

    def __init__(self, read: Callable[[], Readings]) -> None:
        self._read = read

    def describe(self) -> list[Family]:
        """Return nothing: else registering would read."""
        return []

    def collect(self) -> Iterator[Family]:
        """Yield the families of one scrape."""
        for metric, samples in self._read():
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=tuple(metric.labels))
            for labels, value in samples:
                family.add_metric(labels, value)
            yield family


def landed(tally: Mapping[str, int]) -> Readings:
    """Return what this process has landed."""
    yield declared.ROWS, [((outcome,), tally.get(outcome, 0)) for outcome in _OUTCOMES]
    tokens = [((kind,), tally.get(key, 0)) for kind, key in _TOKENS.items()]
    yield declared.LANDED_TOKENS, tokens


recorder = Recorder()
"""This process's."""

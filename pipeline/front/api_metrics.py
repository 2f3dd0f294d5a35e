"""The metrics of the API: its own, those of its upload process, and the deployment's from SQL."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
from prometheus_client import generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from nightjar.jobs.api.health import OK, Deployment
from nightjar.jobs.api.observing import Observe, ReadMetrics
from nightjar.jobs.errors import StoreError
from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.store import Store
from nightjar.jobs.store.depths import Depths
from nightjar.jobs.store.waiting import SILENT_AFTER_S
from nightjar.pipeline.metrics import declarations as declared
from nightjar.pipeline.metrics.recording import Readings, landed, recorder

logger = logging.getLogger(__name__)

READ_EVERY_S = 5.0
"""Between two readings of the database, however often the metrics are scraped."""

_UPLOADS_S = 2.0
_OTHER = "other"  # the model of micro-batches of a model that no planner plans for any more
_UNREAD = "uploads' metrics are unread: %s"


@dataclass(frozen=True, slots=True)
class Monitoring:
    """How an application tells of its requests, and what it shows."""

    observe: Observe
    read: ReadMetrics


def observe_request(method: str, route: str, status: str, seconds: float) -> None:
    """Note a request of the API."""
    recorder.observe(declared.HTTP, seconds, method, route, status)
    logger.debug(
        "%s %s answered with %s",
        method,
        route,
        status,
        extra={"action": "answer", "seconds": round(seconds, 6)},
    )


def observe_upload(_: str, route: str, status: str, seconds: float) -> None:
    """Note an upload; the API counts the request."""
    recorder.observe(declared.UPLOAD, seconds, route, status)


def own_metrics(_: str | None) -> bytes:
    """Return this process's own metrics."""
    return b"" if recorder.registry is None else generate_latest(recorder.registry)


class ApiMetrics:
    """Answers `GET /metrics`.

    Args:
        store: Whose readings are shared by all scrapes of some seconds.
        deployment: Knows which parts work.
        uploads: The unix socket of the upload process.
        upload_trouble: Says why no upload is taken; None while they are.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        deployment: Deployment,
        uploads: Path,
        upload_trouble: Callable[[], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._deployment = deployment
        self._socket = uploads
        self._upload_trouble = upload_trouble
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._readings: list[tuple[declared.Metric, list[tuple[tuple[str, ...], float]]]] = []
        self._client = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(uploads)), timeout=_UPLOADS_S, trust_env=False
        )
        recorder.open(declared.API)
        recorder.add_readings(lambda: landed(store.database.tally.read()))
        recorder.add_readings(self._deployment_readings)

    def read(self, authorization: str | None) -> bytes:
        """Return the metrics; the upload process checks the header itself."""
        if recorder.registry is None:
            return b""
        own = _labelled(recorder.registry.collect(), declared.API)
        theirs = _labelled(self._uploads(authorization), declared.UPLOADS)
        return generate_latest(_Merged([*own, *theirs]))

    def _uploads(self, authorization: str | None) -> list[Family]:
        if not self._socket.exists():  # it starts, or starts again
            return []
        headers = {} if authorization is None else {"authorization": authorization}
        try:
            answer = self._client.get("http://uploads/metrics", headers=headers)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            logger.warning(_UNREAD, type(error).__name__, extra={"action": "uploads_unread"})
            return []
        return list(text_string_to_metric_families(answer.text))

    def _deployment_readings(self) -> Readings:
        with self._lock:  # scrapes at the same moment read once
            if self._clock() - self._read_at >= READ_EVERY_S:
                self._readings = [(metric, list(rows)) for metric, rows in self._read_store()]
                self._read_at = self._clock()
            return list(self._readings)

    def _read_store(self) -> Readings:
        parts = {"uploads": OK if self._upload_trouble() is None else ""}
        try:
            yield from _waiting(self._store.depths.read(), self._names())
            yield declared.WORKERS, [((), self._store.heartbeats.living(SILENT_AFTER_S))]
            parts |= {"database": OK, **self._deployment.parts()}
        except StoreError as error:
            logger.warning("metrics unread: %s", error, extra={"action": "metrics_unread"})
            parts["database"] = ""
        yield declared.PART_UP, [((name,), float(said == OK)) for name, said in parts.items()]

    def _names(self) -> dict[str, str]:
        return {one.fingerprint: one.name for one in self._store.models.known()}


def _waiting(depths: Depths, names: dict[str, str]) -> Readings:
    counts: dict[tuple[str, ...], float] = {}
    ages: dict[tuple[str, ...], float] = {}
    now = datetime.now(UTC)
    for queue in depths.queues:
        batch = names.get(queue.fingerprint, _OTHER), queue.kind, str(queue.bucket)
        key = *batch, queue.state.value
        counts[key] = counts.get(key, 0) + queue.count
        if queue.state is not MicroBatchState.LEASED:
            age = max(0.0, (now - queue.oldest).total_seconds())
            ages[batch] = max(age, ages.get(batch, 0.0))
    yield declared.QUEUE_DEPTH, counts.items()
    yield declared.QUEUE_AGE, ages.items()
    yield declared.QUEUE_CUT, [((), float(depths.cut))]
    yield declared.OPEN_JOBS, [((), depths.jobs)]
    yield declared.OPEN_ROWS, [((), depths.rows)]


def _labelled(families: Iterable[Family], process: str) -> Iterator[Family]:
    """Yield the families; the numbers of an operating system's process get a label for it."""
    for family in families:
        if family.name.startswith("process_"):
            family.samples = [
                sample._replace(labels={**sample.labels, "process": process})
                for sample in family.samples
            ]
        yield family


class _Merged:
    """A registry of families, in which those of one name are one."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families: dict[str, Family] = {}
        for family in families:
            first = self._families.setdefault(family.name, family)
            if first is not family:
                first.samples.extend(family.samples)

    def collect(self) -> Iterable[Family]:
        """Return the families."""
        return self._families.values()

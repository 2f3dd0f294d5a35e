"""Draws a snapshot as text that fits a terminal; no text of others steers the terminal."""

from collections.abc import Mapping
from datetime import datetime

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from nightjar.jobs.records import Job
from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.workers import WorkerStatus
from nightjar.pipeline.front.top.reading import Rates, Snapshot
from nightjar.pipeline.front.top.table import Column, Row, part, shared, short, span
from nightjar.visible import visible

SILENT_AFTER_S = 15.0
_LEAST_HEIGHT = 14
_FRAME = 8  # two lines at the head, and a title and names of columns for each of the three parts
_BAR = 10
_STATES = (MicroBatchState.READY, MicroBatchState.DISPATCHED, MicroBatchState.LEASED)

_JOB_COLUMNS = (
    Column("job", 32, 0),
    Column("tenant", 12, 7),
    Column("state", 10, 4),
    Column("", _BAR, 6),
    Column("done", 6, 1, right=True),
    Column("failed", 6, 5, right=True),
    Column("rows/s", 8, 3, right=True),
    Column("left", 6, 2, right=True),
)
_QUEUE_COLUMNS = (
    Column("model", 20, 0),
    Column("kind", 8, 4),
    Column("bucket", 8, 3, right=True),
    Column("ready", 6, 1, right=True),
    Column("sent", 6, 5, right=True),
    Column("computing", 9, 2, right=True),
    Column("oldest job", 10, 6, right=True),
)
_WORKER_COLUMNS = (
    Column("worker", 28, 0),
    Column("model", 20, 2),
    Column("device", 8, 6),
    Column("batches", 7, 4, right=True),
    Column("running", 9, 3, right=True),
    Column("KV used", 7, 5, right=True),
    Column("seen", 7, 1, right=True),
)


def screen(
    snapshot: Snapshot, rates: Rates, width: int, height: int, trouble: str = ""
) -> RenderableType:
    """Return the picture: at most `height` lines of `width` characters.

    trouble: why the picture is not renewed; empty where it is.
    """
    jobs, queues, workers = _jobs(snapshot, rates), _queues(snapshot), _workers(snapshot)
    room = shared(max(height, _LEAST_HEIGHT) - _FRAME, [len(jobs), len(queues), len(workers)])
    every_job = max(snapshot.depths.jobs, len(jobs))
    return Group(
        _head(snapshot, rates),
        Text(visible(trouble), style="bold red", no_wrap=True, overflow="ellipsis"),
        *part("Jobs", _JOB_COLUMNS, jobs[: room[0]], every_job, width),
        *part("Micro-batches", _QUEUE_COLUMNS, queues[: room[1]], len(queues), width),
        *part("GPU workers", _WORKER_COLUMNS, workers[: room[2]], len(workers), width),
    )


def _head(snapshot: Snapshot, rates: Rates) -> Text:
    depths = snapshot.depths
    more = "+" if depths.cut else ""
    told = [
        f"{snapshot.at:%H:%M:%S} UTC",
        f"open jobs: {depths.jobs:,}{more}",
        f"rows left: {depths.rows:,}{more}",
        f"rows/s: {sum(rates.rows.values()):,.1f}",
    ]
    if rates.tokens is not None:
        told.append(f"tokens/s: {rates.tokens:,.0f}")
    return Text("  ".join(told), style="bold", no_wrap=True, overflow="ellipsis")


def _jobs(snapshot: Snapshot, rates: Rates) -> list[Row]:
    return [_job(job, rates.rows.get(job.id, 0.0)) for job in snapshot.jobs]


def _job(job: Job, rate: float) -> Row:
    share = job.ended / job.total if job.total else 0.0
    return [
        Text(visible(job.id, 60)),
        Text(visible(job.tenant, 60)),
        Text(job.state.value),
        ProgressBar(total=1.0, completed=share, width=_BAR),
        Text(f"{100 * share:.1f}%"),
        Text(short(job.failed), style="red" if job.failed else ""),
        Text(f"{rate:,.1f}"),
        Text(span((job.total - job.ended) / rate) if rate > 0 else "-"),
    ]


def _queues(snapshot: Snapshot) -> list[Row]:
    found: dict[tuple[str, str, int], dict[MicroBatchState, int]] = {}
    oldest: dict[tuple[str, str, int], datetime] = {}
    for queue in snapshot.depths.queues:
        key = (queue.fingerprint, queue.kind, queue.bucket)
        counts = found.setdefault(key, {})
        counts[queue.state] = counts.get(queue.state, 0) + queue.count
        oldest[key] = min(queue.oldest, oldest.get(key, queue.oldest))
    return [
        [
            Text(visible(snapshot.models.get(key[0], key[0][:12]), 60)),
            Text(key[1]),
            Text(f"{key[2]:,}"),
            *(Text(short(found[key].get(state, 0))) for state in _STATES),
            Text(span((snapshot.at - oldest[key]).total_seconds())),
        ]
        for key in sorted(found)
    ]


def _workers(snapshot: Snapshot) -> list[Row]:
    """A line for each model of each worker."""
    rows: list[Row] = []
    for worker in snapshot.workers:
        silent_s = (snapshot.at - worker.seen_at).total_seconds()
        seen = Text(span(silent_s), style="bold red" if silent_s > SILENT_AFTER_S else "")
        name, count = _name(worker), short(int(worker.status.get("micro_batch_count", 0)))
        for model in worker.status.get("models") or [{}]:
            rows.append([Text(name), *_model(model, count), seen])
            name = count = ""  # each is of the whole worker: on its first line alone
    return rows


def _name(worker: WorkerStatus) -> str:
    """Host and process: what an operator looks for."""
    host, pid = worker.status.get("host"), worker.status.get("pid")
    return visible(worker.owner if host is None else f"{host}:{pid}", 60)


def _model(model: Mapping[str, object], count: str) -> list[Text]:
    """What a worker of an older version does not say stays empty."""
    held, blocks = int(str(model.get("kv_held") or 0)), int(str(model.get("kv_blocks") or 0))
    return [
        Text(visible(model.get("name", "-"), 60)),
        Text(visible(model.get("device") or "-", 20)),
        Text(count),
        Text(f"{model.get('running') or 0}/{model.get('slots') or 0}"),
        Text(f"{100 * held / blocks:.0f}%" if blocks else "-"),
    ]

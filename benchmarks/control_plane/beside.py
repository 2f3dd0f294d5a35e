"""What bulk jobs do to what is urgent: seconds of a one-row job, and of a dead worker's work."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.control_plane.requests import batch_line, body, write_jobs
from benchmarks.control_plane.services import Deployment, wait_until
from benchmarks.control_plane.watch import resident_bytes
from nightjar.jobs.lines.schemas import validate_body
from nightjar.jobs.records import EncodedRequest, NewJob, NewMicroBatch, NewRequest
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.workers import ComputeSeconds
from nightjar.pipeline.client.blocking import Client

BULK_JOBS = 2
_PATIENCE_S = 900.0
_LOOK_EVERY_S = 0.05
_PRIORITY = 9
_DEAD_WORKER = "a worker that is gone"
_LONG_ROW_BYTES = 4 << 20  # the longest line that is taken, less what is around the text


def measure(
    running: Deployment, database_url: str, folder: Path, model: Path, rows: int
) -> dict[str, Any]:
    """Two bulk jobs of so many rows; beside them a one-row job of priority 9 and a dead worker."""
    files = write_jobs(folder, model, BULK_JOBS * rows, rows)
    store = Store(database_url)
    try:
        with Client(running.api_url) as client:
            bulk = [client.submit(path).id for path in files]
        victim = _leave_a_dead_workers_lease(store)
        urgent = _submit(store)
        awaited: dict[str, Callable[[], bool]] = {
            "urgent_job_s": lambda: store.jobs.get(urgent).is_over,
            "dead_workers_lease_back_s": lambda: not store.leases.held_by(_DEAD_WORKER),
            "dead_workers_work_done_again_s": lambda: store.jobs.get(victim).is_over,
        }
        seconds = _seconds_until(awaited)
        over = [store.jobs.get(job_id).is_over for job_id in bulk]
        for job_id in bulk:
            store.stopping.cancel(job_id)
    finally:
        store.close()
    return {
        "bulk_jobs": BULK_JOBS,
        "bulk_rows_each": rows,
        "bulk_jobs_over_by_then": sum(over),
        **seconds,
    }


def measure_long_rows(running: Deployment, folder: Path, rows: int) -> dict[str, Any]:
    """The planner's peak memory while it refuses rows of 4 MB each."""
    path = folder / "long.jsonl"
    text = "word " * ((_LONG_ROW_BYTES - 4096) // 5)
    with path.open("w", encoding="utf-8") as stream:
        for index in range(rows):
            asked = {"prompt": f"{index} {text}", "max_tokens": 4}
            stream.write(batch_line(f"long-{index}", "/v1/completions", asked))
    planner, peak = running.processes()["planner"], [0]
    with Client(running.api_url) as client:
        job = client.submit(path)

        def has_ended() -> bool:
            peak.append(resident_bytes(planner))
            return job.status().is_over

        wait_until(has_ended, _PATIENCE_S, _LOOK_EVERY_S)
        refused = job.status().counts.failed
    return {
        "rows": rows,
        "row_bytes": _LONG_ROW_BYTES,
        "refused": refused,
        "planner_peak_mib": round(max(peak) / 2**20, 1),
    }


def _seconds_until(awaited: Mapping[str, Callable[[], bool]]) -> dict[str, float]:
    """After how many seconds each has come; those that do not come are left out."""
    began = time.monotonic()
    seconds: dict[str, float] = {}
    while len(seconds) < len(awaited) and time.monotonic() - began < _PATIENCE_S:
        time.sleep(_LOOK_EVERY_S)
        for name, has_come in awaited.items():
            if name not in seconds and has_come():
                seconds[name] = round(time.monotonic() - began, 2)
    return seconds


def _submit(store: Store) -> str:
    """One urgent row; past the API, so that the planner finds it by itself."""
    asked = validate_body(RequestKind.GENERATE, body("an urgent question"))
    with store.jobs.submit(NewJob("demo", priority=_PRIORITY)) as submission:
        submission.add([NewRequest(0, 1, "row-0", RequestKind.GENERATE, asked)])
    return submission.job_id


def _leave_a_dead_workers_lease(store: Store) -> str:
    """A job whose only micro-batch a worker has claimed that never beats again."""
    while True:
        job_id = _submit(store)
        ids = [request.id for request in store.backlog.queued_requests(job_id, 1)]
        encoded = [EncodedRequest(id_, [[1, 2, 3]]) for id_ in ids]
        refs = store.planning.save_plan(
            job_id, encoded, [NewMicroBatch(RequestKind.GENERATE, 32, ids, 19)]
        )
        store.heartbeats.beat(_DEAD_WORKER, ComputeSeconds())
        if refs and store.leases.claim(refs[0].id, refs[0].epoch, _DEAD_WORKER) is not None:
            return job_id

"""What bulk jobs do to what is urgent: seconds of a one-row job, and of a dead worker's work."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.control_plane.requests import batch_line, body, plan, submit, write_jobs
from benchmarks.control_plane.services import Deployment
from nightjar.jobs.store import Store
from nightjar.jobs.workers import ComputeSeconds
from nightjar.pipeline.client.blocking import Client

BULK_JOBS = 2
_PATIENCE_S = 900.0
_EVERY_S = 0.05
_PRIORITY = 9
_DEAD_WORKER = "a worker that is gone"
_LONG_ROW_BYTES = 4 << 20  # the longest line that is taken, less what is around the text


def measure(running: Deployment, folder: Path, model: Path, rows: int) -> dict[str, Any]:
    """Two bulk jobs of so many rows; beside them a one-row job of priority 9 and a dead worker."""
    files = write_jobs(folder, model, BULK_JOBS * rows, rows)
    store = running.system.store
    with Client(running.api_url) as client:
        bulk = [client.submit(path) for path in files]
        victim = _leave_a_dead_workers_lease(store)
        urgent = _submit_urgent(store)
        awaited: dict[str, Callable[[], bool]] = {
            "urgent_job_s": lambda: store.jobs.get(urgent).is_over,
            "dead_workers_lease_back_s": lambda: not store.leases.held_by(_DEAD_WORKER),
            "dead_workers_work_done_again_s": lambda: store.jobs.get(victim).is_over,
        }
        seconds = _seconds_until(awaited)
        over = sum(job.status().is_over for job in bulk)
        for job in bulk:
            job.cancel()
    jobs = {"bulk_jobs": BULK_JOBS, "bulk_rows_each": rows, "bulk_jobs_over_by_then": over}
    return jobs | seconds


def measure_long_rows(running: Deployment, folder: Path, rows: int) -> dict[str, Any]:
    """The planner's peak memory while it refuses rows of 4 MB each."""
    path = folder / "long.jsonl"
    text = "word " * ((_LONG_ROW_BYTES - 4096) // 5)
    with path.open("w", encoding="utf-8") as stream:
        for index in range(rows):
            stream.write(batch_line(f"row-{index}", "/v1/completions", body(f"{index} {text}", 4)))
    with Client(running.api_url) as client, running.watch(every_s=_EVERY_S) as watch:
        refused = client.submit(path).wait(_PATIENCE_S).counts.failed
    return {
        "rows": rows,
        "row_bytes": _LONG_ROW_BYTES,
        "refused": refused,
        "planner_peak_mib": watch.memory()["planner"]["peak_mib"],
    }


def _seconds_until(awaited: Mapping[str, Callable[[], bool]]) -> dict[str, float]:
    """After how many seconds each has come; those that do not come are left out."""
    began = time.monotonic()
    seconds: dict[str, float] = {}
    while len(seconds) < len(awaited) and time.monotonic() - began < _PATIENCE_S:
        time.sleep(_EVERY_S)
        for name, has_come in awaited.items():
            if name not in seconds and has_come():
                seconds[name] = round(time.monotonic() - began, 2)
    return seconds


def _submit_urgent(store: Store) -> str:
    """One urgent row; past the API, so that the planner finds it by itself."""
    return submit(store, ["an urgent question"], priority=_PRIORITY)


def _leave_a_dead_workers_lease(store: Store) -> str:
    """A job whose only micro-batch a worker has claimed that never beats again."""
    while True:
        job_id = _submit_urgent(store)
        refs = plan(store, job_id, 1)
        store.heartbeats.beat(_DEAD_WORKER, ComputeSeconds())
        if refs and store.leases.claim(refs[0].id, refs[0].epoch, _DEAD_WORKER) is not None:
            return job_id

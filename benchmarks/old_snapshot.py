"""How calls of the store slow down while somebody holds an old snapshot, as a backup does.

PostgreSQL then keeps each version of each row, and indexes lead to all of them. A job runs, first
without a snapshot and then beside one: its micro-batches are claimed and finished, and between them
the calls of planner and workers are timed. The figures are of the last calls, before the job ends.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median

from benchmarks.control_plane.requests import plan, submit
from benchmarks.control_plane.services import fresh_database
from benchmarks.harness import Benchmark, Figures
from benchmarks.written_bytes import administering
from nightjar.jobs.records import MicroBatchRef, NewResult
from nightjar.jobs.store import Store

MODEL = "f" * 64
OWNER = "worker"
CHUNK = 2_048
REPEATS = 15


def measure(args: Namespace, folder: Path) -> Figures:
    """Milliseconds of each call without a snapshot and beside one, and their ratio."""
    with (
        fresh_database("postgresql", folder) as database,
        closing(Store(database.url)) as store,
    ):
        store.migrate()
        alone = times(store, args.rows, args.each)
        with snapshot(database.url):
            beside = times(store, args.rows, args.each)
    ratio = {name: round(beside[name] / alone[name], 1) for name in alone}
    return {"rows": args.rows, "alone_ms": alone, "beside_ms": beside, "ratio": ratio}


@contextmanager
def snapshot(url: str) -> Iterator[None]:
    """A transaction that goes on seeing what is there now."""
    with administering(url) as connection:
        connection.exec_driver_sql("BEGIN ISOLATION LEVEL REPEATABLE READ")
        connection.exec_driver_sql("SELECT count(*) FROM job")
        yield
        connection.exec_driver_sql("COMMIT")


def times(store: Store, rows: int, each: int) -> dict[str, float]:
    """Compute all but the last chunk of a job, and time the calls then."""
    job_id = submit(store, (f"the owl {number}" for number in range(rows)), merge_equal=False)
    for _ in range(rows // CHUNK - 1):
        for ref in plan(store, job_id, CHUNK, each, MODEL):
            compute(store, ref)
    refs = iter(plan(store, job_id, CHUNK // 2, each, MODEL))
    calls: dict[str, Callable[[], object]] = {
        "jobs_to_plan": store.backlog.jobs_to_plan,
        "planning_window": lambda: store.backlog.queued_requests(job_id, 128),
        "dispatchable": lambda: store.planning.dispatchable(16),
        "status": lambda: store.jobs.get(job_id),
        "leases_held": lambda: store.leases.held_by(OWNER),
        "claim_and_finish": lambda: compute(store, next(refs)),
    }
    found = {name: _milliseconds(call) for name, call in calls.items()}
    store.stopping.cancel(job_id)
    store.stopping.finish()
    return found


def compute(store: Store, ref: MicroBatchRef) -> None:
    """Claim and finish a micro-batch."""
    claimed = store.leases.claim(ref.id, ref.epoch, OWNER, MODEL)
    assert claimed is not None
    results = [NewResult(one.id, 200, {"text": "in the barn"}) for one in claimed.requests]
    store.leases.finish(ref.id, ref.epoch, OWNER, results)


def _milliseconds(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return round(median(seconds) * 1e3, 2)


OPTIONS = {"--rows": (50_000, "of each job"), "--each": (16, "requests of a micro-batch")}
BENCHMARK = Benchmark("old_snapshot", __doc__, measure, options=OPTIONS)

if __name__ == "__main__":
    BENCHMARK.main()

"""How long others wait while a job of a million rows is purged.

One process claims and finishes micro-batches of a job, as a GPU worker does, and asks what is to be
dispatched. First it is alone with a process that sweeps and has nothing to purge; then that process
purges the large job. Both are on one machine. The figures are of `claim`, `finish` and
`dispatchable`, each a call of the store.
"""

import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing import get_context
from pathlib import Path

from benchmarks.control_plane.requests import plan, submit
from benchmarks.control_plane.services import fresh_database
from benchmarks.control_plane.watch import latencies
from benchmarks.harness import DATABASES, Benchmark, Figures
from nightjar.jobs.purge_records import PurgeScope
from nightjar.jobs.records import MicroBatchRef, NewResult
from nightjar.jobs.store import Store
from nightjar.pipeline.queue.sweeper import Sweeper
from tests.bulk_jobs import finished_job

EACH = 64
"""Requests of a micro-batch, and micro-batches of a job."""
SWEEP_EVERY_S = 1.0
LOOK_EVERY_S = 1.0
PAUSE_S = 0.01  # a worker computes in between
MODEL = "f" * 64


def measure(args: Namespace, folder: Path) -> Figures:
    """The delays of a worker's calls, without a purge and beside one."""
    with (
        fresh_database(args.way, folder) as database,
        closing(Store(database.url)) as store,
    ):
        store.migrate()
        large = finished_job(store, args.rows, days=30)
        if not store.database.is_sqlite:
            with store.database.reading() as connection:
                connection.exec_driver_sql("ANALYZE")
        ends = time.monotonic() + args.quiet_s
        with sweeping(database.url, keep_days=None):
            alone = calls_until(store, lambda: time.monotonic() > ends)
        began = time.monotonic()
        with sweeping(database.url, keep_days=7.0):
            beside = calls_until(store, lambda: is_purged(store, large))
        purge_s = round(time.monotonic() - began, 1)
    return {"rows": args.rows, "purge_s": purge_s, "alone": alone, "beside_purge": beside}


def is_purged(store: Store, job_id: str) -> bool:
    """Whether the job is purged to its end."""
    done = store.jobs.get(job_id).purged_at is not None
    return done and not store.purging.marked(PurgeScope(job_id=job_id))


def calls_until(store: Store, is_over: Callable[[], bool]) -> Figures:
    """Claim and finish micro-batches of other jobs until it is over; the latencies of each call."""
    seconds: dict[str, list[float]] = defaultdict(list)
    looked = time.monotonic()
    while True:
        texts = (f"the owl {number}" for number in range(EACH * EACH))
        job_id = submit(store, texts, merge_equal=False)
        for ref in plan(store, job_id, EACH * EACH, EACH, MODEL):
            compute(store, ref, seconds)
            if time.monotonic() - looked > LOOK_EVERY_S:
                looked = time.monotonic()
                if is_over():
                    return {name: latencies(found) for name, found in seconds.items()}


def compute(store: Store, ref: MicroBatchRef, seconds: dict[str, list[float]]) -> None:
    """What a worker does with a micro-batch."""
    with timed(seconds["dispatchable"]):
        store.planning.dispatchable(16)
    with timed(seconds["claim"]):
        claimed = store.leases.claim(ref.id, ref.epoch, "worker", MODEL)
    assert claimed is not None
    time.sleep(PAUSE_S)
    results = [
        NewResult(one.id, 200, {"text": "in the barn"}, prompt_tokens=3, completion_tokens=2)
        for one in claimed.requests
    ]
    with timed(seconds["finish"]):
        store.leases.finish(claimed.id, claimed.epoch, "worker", results)


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Append the seconds that the block takes."""
    began = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - began)


@contextmanager
def sweeping(url: str, keep_days: float | None) -> Iterator[None]:
    """A process that sweeps as the planner does."""
    with get_context("spawn").Pool(1) as pool:  # which ends its process with the block
        pool.apply_async(_sweep, (url, keep_days), error_callback=print)
        yield


def _sweep(url: str, keep_days: float | None) -> None:
    sweeper = Sweeper(
        Store(url),
        dead_after_s=3_600,
        redispatch_after_s=3_600,
        longest_gap_s=2,
        deaths_allowed=3,
        keep_results_s=None if keep_days is None else keep_days * 86_400,
    )
    while True:
        began = time.monotonic()
        sweeper.sweep(SWEEP_EVERY_S / 2)
        time.sleep(max(SWEEP_EVERY_S / 10, SWEEP_EVERY_S - (time.monotonic() - began)))


OPTIONS = {"--rows": (1_000_000, "of the job"), "--quiet-s": (60.0, "seconds without a purge")}
BENCHMARK = Benchmark("purging", __doc__, measure, DATABASES, options=OPTIONS)

if __name__ == "__main__":
    BENCHMARK.main()

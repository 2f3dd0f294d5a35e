"""How long others wait while a job of a million rows is purged.

`python -m benchmarks.purging [--url postgresql://...] [--rows 1000000] [--out FILE.json]`

One process claims and finishes micro-batches of a job, as a GPU worker does, and asks what is to be
dispatched. First it is alone with a process that sweeps and has nothing to purge; then that process
purges the large job. Both databases are on one machine. The figures are of `claim`, `finish` and
`dispatchable`, each a call of the store.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from nightjar.jobs.lines.schemas import validate_body
from nightjar.jobs.purge_records import PurgeScope
from nightjar.jobs.records import (
    EncodedRequest,
    MicroBatchRef,
    NewJob,
    NewMicroBatch,
    NewRequest,
    NewResult,
)
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.pipeline.queue.sweeper import Sweeper
from tests.bulk_jobs import finished_job

EACH = 64
SWEEP_EVERY_S = 1.0
PAUSE_S = 0.01  # a worker computes in between
MODEL = "f" * 64
Times = dict[str, list[float]]


def main() -> None:
    """Measure, and print or write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a database without jobs (default: a SQLite file)")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--quiet-s", type=float, default=60.0, help="seconds without a purge")
    parser.add_argument("--folder", type=Path, help="where the SQLite file is made")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        url = given.url or f"sqlite:///{folder}/nightjar.db"
        found = measure(url, given.rows, given.quiet_s)
    text = json.dumps({"machine": describe(1, with_torch=False), **found}, indent=2)
    if given.out is None:
        print(text)
    else:
        given.out.write_text(f"{text}\n", encoding="utf-8")


def measure(url: str, rows: int, quiet_s: float) -> dict[str, Any]:
    """The delays of a worker's calls, without a purge and beside one."""
    store = Store(url)
    store.migrate()
    large = finished_job(store, rows, days=30)
    if not store.database.is_sqlite:
        with store.database.reading() as connection:
            connection.exec_driver_sql("ANALYZE")
    work = Landing(store)
    with sweeping(url, keep_days=None):
        alone = work.run(lambda: work.seconds >= quiet_s)
    began = time.monotonic()
    with sweeping(url, keep_days=7.0):
        beside = work.run(lambda: is_purged(store, large))
    purge_s = time.monotonic() - began
    store.close()
    return {
        "database": "sqlite" if url.startswith("sqlite") else "postgresql",
        "rows": rows,
        "purge_s": round(purge_s, 1),
        "alone": summary(alone),
        "beside_purge": summary(beside),
    }


def is_purged(store: Store, job_id: str) -> bool:
    """Whether the job is purged to its end."""
    done = store.jobs.get(job_id).purged_at is not None
    return done and not store.purging.marked(PurgeScope(job_id=job_id))


class Landing:
    """Another job whose results land, micro-batch after micro-batch."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.seconds = 0.0

    def run(self, is_over: Any) -> Times:  # noqa: ANN401 - a function without arguments
        """Claim and finish until it is over; the seconds of each call, by its name."""
        times: Times = {"claim": [], "finish": [], "dispatchable": []}
        began = looked = time.monotonic()
        while True:
            for ref in self._planned():
                self._compute(ref, times)
                self.seconds = time.monotonic() - began
                if time.monotonic() - looked > 1.0:
                    looked = time.monotonic()
                    if is_over():
                        return times

    def _compute(self, ref: MicroBatchRef, times: Times) -> None:
        with timed(times["dispatchable"]):
            self._store.planning.dispatchable(16)
        with timed(times["claim"]):
            claimed = self._store.leases.claim(ref.id, ref.epoch, "worker", MODEL)
        if claimed is None:
            raise RuntimeError("the micro-batch is not to be claimed")
        time.sleep(PAUSE_S)
        results = [
            NewResult(one.id, 200, {"text": "in the barn"}, prompt_tokens=3, completion_tokens=2)
            for one in claimed.requests
        ]
        with timed(times["finish"]):
            self._store.leases.finish(claimed.id, claimed.epoch, "worker", results)

    def _planned(self) -> list[MicroBatchRef]:
        """The micro-batches of a new job."""
        body = validate_body(RequestKind.GENERATE, {"prompt": "the owl", "max_tokens": 4})
        with self._store.jobs.submit(NewJob("tiny", merge_equal=False)) as made:
            made.add(
                NewRequest(n, n + 1, f"row-{n}", RequestKind.GENERATE, body)
                for n in range(64 * EACH)
            )
        ids = [one.id for one in self._store.backlog.queued_requests(made.job_id, 64 * EACH)]
        groups = [ids[start : start + EACH] for start in range(0, len(ids), EACH)]
        return self._store.planning.save_plan(
            made.job_id,
            [EncodedRequest(id_, [[1, 2, 3]]) for id_ in ids],
            [NewMicroBatch(RequestKind.GENERATE, 32, group, 7 * EACH) for group in groups],
            fingerprint=MODEL,
        )


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Append the seconds that the block takes."""
    began = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - began)


def summary(times: Times) -> dict[str, Any]:
    """Median, 99th percentile and the longest of each call, in milliseconds."""
    found = {}
    for name, seconds in times.items():
        ordered = sorted(seconds)
        places = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
        found[name] = {"calls": len(ordered)} | {
            place: round(ordered[min(len(ordered) - 1, int(part * len(ordered)))] * 1_000, 1)
            for place, part in places.items()
        }
    return found


@contextmanager
def sweeping(url: str, keep_days: float | None) -> Iterator[None]:
    """A process that sweeps as the planner does."""
    process = multiprocessing.get_context("spawn").Process(
        target=_sweep, args=(url, keep_days), daemon=True
    )
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _sweep(url: str, keep_days: float | None) -> None:
    keep_s = None if keep_days is None else keep_days * 86_400
    sweeper = Sweeper(
        Store(url),
        dead_after_s=3_600,
        redispatch_after_s=3_600,
        longest_gap_s=2,
        deaths_allowed=3,
        keep_results_s=keep_s,
    )
    while True:
        began = time.monotonic()
        sweeper.sweep(SWEEP_EVERY_S / 2)
        time.sleep(max(SWEEP_EVERY_S / 10, SWEEP_EVERY_S - (time.monotonic() - began)))


if __name__ == "__main__":
    main()

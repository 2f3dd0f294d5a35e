"""How fast `nightjar export` writes the results of a job, beside a copy of the files it wrote.

A job is planned, claimed and finished through the store, as workers do it, so that its answers are
in packs. Then the command exports it: as JSON lines and as Parquet, by one process and by two. Each
copy reads and writes the same bytes, and ends with a sync.
"""

import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import closing
from pathlib import Path

from benchmarks.control_plane.requests import submit
from benchmarks.control_plane.services import fresh_database
from benchmarks.drawn_texts import drawn_texts
from benchmarks.harness import DATABASES, Benchmark, Figures
from nightjar.jobs.records import EncodedRequest, NewMicroBatch, NewResult
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store

EACH = 128
"""Requests of a micro-batch, as the settings have it."""
CHUNK = 4_096
CHARACTERS = 400
DISTINCT = 20_000
MODEL = "f" * 64
FORMATS = ("jsonl", "parquet")


def measure(args: Namespace, folder: Path) -> Figures:
    """Seconds and MB/s of each format and number of processes."""
    with fresh_database(args.way, folder) as database, closing(Store(database.url)) as store:
        store.migrate()
        job_id = computed_job(store, args.rows)
        found: Figures = {"rows": args.rows}
        for format_ in FORMATS:
            for processes in (1, 2):
                target = folder / f"{format_}-{processes}"
                one = exported(database.url, job_id, target, format_, processes)
                one["rows_per_s"] = round(args.rows / one["seconds"])
                found[f"{format_}_{processes}"] = one
                shutil.rmtree(target)
    return found


def exported(url: str, job_id: str, target: Path, format_: str, processes: int) -> Figures:
    """What one export takes, and a copy of what it wrote."""
    options = ("--to", str(target), "--format", format_, "--processes", str(processes))
    command = [sys.executable, "-m", "nightjar", "export", job_id, *options]
    began = time.monotonic()
    subprocess.run(command, check=True, env=os.environ | {"NIGHTJAR_DATABASE_URL": url})
    seconds = time.monotonic() - began
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    copy_s = copied(target, target.with_suffix(".copy"))
    return {
        "seconds": round(seconds, 2),
        "megabytes": round(size / 1e6, 1),
        "mb_per_s": round(size / 1e6 / seconds, 1),
        "copy_s": round(copy_s, 2),
        "copy_over_export": round(copy_s / seconds, 3),
    }


def copied(source: Path, target: Path) -> float:
    """Seconds to copy the files and to sync them."""
    began = time.monotonic()
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    seconds = time.monotonic() - began
    shutil.rmtree(target)
    return seconds


def computed_job(store: Store, rows: int) -> str:
    """A job of so many rows, each answered with a text of its own."""
    texts = list(drawn_texts(min(rows, DISTINCT), CHARACTERS))
    prompts = (f"the owl {number}" for number in range(rows))
    job_id = submit(store, prompts, merge_equal=False)
    while queued := store.backlog.queued_requests(job_id, CHUNK):
        ids = [one.id for one in queued]
        refs = store.planning.save_plan(
            job_id,
            [EncodedRequest(id_, [[1, 2, 3]], asked={}) for id_ in ids],
            [
                # Rows of all the chunk, as where lengths differ.
                NewMicroBatch(RequestKind.GENERATE, 32, ids[first :: CHUNK // EACH], 3 * EACH)
                for first in range(min(CHUNK // EACH, len(ids)))
            ],
            fingerprint=MODEL,
        )
        for ref in refs:
            claimed = store.leases.claim(ref.id, ref.epoch, "worker", MODEL)
            assert claimed is not None
            results = [
                NewResult(one.id, 200, _answer(f"{one.index} {texts[one.index % len(texts)]}"))
                for one in claimed.requests
            ]
            store.leases.finish(ref.id, ref.epoch, "worker", results)
    return job_id


def _answer(text: str) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": "length"}]}


OPTIONS = {"--rows": (300_000, "of the job")}
BENCHMARK = Benchmark("exporting", __doc__, measure, ways=DATABASES, options=OPTIONS)

if __name__ == "__main__":
    BENCHMARK.main()

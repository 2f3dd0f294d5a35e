"""Batches by OpenAI's files and batches beside native jobs, with the same rows.

Each turn goes from the file on the disk to all results in a file. The `openai` client uploads,
makes a batch, polls, and downloads. `Client` submits and polls; the results come from the job's
`/output`, which is as quick as a job's results can be had. The engine takes no time.
`--upload-mib` uploads one file of that size instead, and says how much memory each process took.
"""

import time
from argparse import Namespace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import httpx
import openai

from benchmarks.control_plane.requests import batch_line, body, write_jobs
from benchmarks.control_plane.services import Deployment, deployment
from benchmarks.harness import DATABASES, Benchmark, Figures, by_turns
from nightjar.pipeline.client.blocking import Client

POLL_EVERY_S = 0.1
_WARM_UP_ROWS = 2_000
_ENDS = ("completed", "failed", "expired", "cancelled")

Turn = dict[str, float]
"""The seconds of each part of a turn, and of the whole."""


def turn_of(began: float, **ended: float) -> Turn:
    """A turn whose parts ended at these moments, one after another."""
    moments = pairwise([began, *ended.values()])
    parts = {name: round(end - start, 2) for name, (start, end) in zip(ended, moments, strict=True)}
    return parts | {"seconds": round(max(ended.values()) - began, 2)}


def by_batch(url: str, source: Path, out: Path) -> Turn:
    """A batch, with the `openai` client."""
    began = time.monotonic()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600.0) as client:
        with source.open("rb") as stream:
            file_id = client.files.create(file=stream, purpose="batch").id
        uploaded = time.monotonic()
        batch_id = client.batches.create(
            input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
        ).id
        while (batch := client.batches.retrieve(batch_id)).status not in _ENDS:
            time.sleep(POLL_EVERY_S)
        if batch.output_file_id is None or batch.error_file_id is not None:
            raise SystemExit(f"the batch ended badly: {batch.to_json()}")
        computed = time.monotonic()
        with client.files.with_streaming_response.content(batch.output_file_id) as answer:
            answer.stream_to_file(out)
    finalizing = float(batch.completed_at or 0) - float(batch.finalizing_at or 0)
    turn = turn_of(began, upload=uploaded, batch=computed, download=time.monotonic())
    return turn | {"finalizing": finalizing}


def by_job(url: str, source: Path, out: Path) -> Turn:
    """A native job, with Nightjar's own client."""
    began = time.monotonic()
    with Client(url) as client:
        job = client.submit(source)
        uploaded = time.monotonic()
        while not job.status().is_over:
            time.sleep(POLL_EVERY_S)
        computed = time.monotonic()
    with httpx.stream("GET", f"{url}/v1/jobs/{job.id}/output", timeout=600.0) as answer:
        answer.raise_for_status()
        with out.open("wb") as stream:
            for piece in answer.iter_bytes():
                stream.write(piece)
    return turn_of(began, upload=uploaded, job=computed, download=time.monotonic())


WAYS = {"batch": by_batch, "job": by_job}


def compare(running: Deployment, args: Namespace, folder: Path) -> Figures:
    """Both ways by turns, each of them first in every second round; their rows/s and the ratio."""
    (warm_up,) = write_jobs(folder, args.model, _WARM_UP_ROWS, _WARM_UP_ROWS)
    for way in WAYS.values():
        way(running.api_url, warm_up, folder / "warm-up.jsonl")
    (source,) = write_jobs(folder, args.model, args.rows, args.rows)

    files = running.api_url, source, folder / "results.jsonl"
    ways = {name: partial(way, *files) for name, way in WAYS.items()}
    turns = by_turns(ways, args.rounds, swapped=True)
    seconds = {name: [turn["seconds"] for turn in found] for name, found in turns.items()}
    ratios = [job / batch for batch, job in zip(seconds["batch"], seconds["job"], strict=True)]
    return {
        "rows": args.rows,
        "file_mib": round(source.stat().st_size / 2**20, 1),
        "rows_per_s": {n: round(args.rows / median(found), 1) for n, found in seconds.items()},
        "ratio": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "turns": turns,
    }


def upload(running: Deployment, args: Namespace, folder: Path) -> Figures:
    """One upload of `args.upload_mib` MiB, with the memory of every process."""
    piece = batch_line("row", "/v1/completions", body("x" * 1_000)).encode() * 1_000
    source = folder / "large.jsonl"
    with source.open("wb") as stream:
        # There is room for the form around it.
        stream.writelines([piece] * (((args.upload_mib << 20) - 4_096) // len(piece)))
    watch = running.watch(shared=False)
    with watch, openai.OpenAI(base_url=f"{running.api_url}/v1", api_key="none") as client:
        began = time.monotonic()
        with source.open("rb") as stream:
            made = client.files.create(file=stream, purpose="batch", timeout=3_600.0)
        seconds = time.monotonic() - began
    mib = round(made.bytes / 2**20, 1)
    return {"file_mib": mib, "seconds": round(seconds, 1), "memory": watch.memory()}


def measure(args: Namespace, folder: Path) -> Figures:
    """All figures with one database."""
    with deployment(args.way, folder, args.model) as running:
        return (upload if args.upload_mib else compare)(running, args, folder)


OPTIONS = {
    "--rows": (200_000, "of the file"),
    "--rounds": (3, "each has a turn of both ways"),
    "--upload-mib": (0, "upload a file of this size instead"),
}
BENCHMARK = Benchmark(
    "batch_files",
    __doc__,
    measure,
    DATABASES,
    options=OPTIONS,
    stem=lambda args: "upload-memory" if args.upload_mib else "batch-files",
)

if __name__ == "__main__":
    BENCHMARK.main()

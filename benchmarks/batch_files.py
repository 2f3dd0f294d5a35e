"""A batch by OpenAI's files and batches over the same rows as a native job, by turns.

    python -m benchmarks.batch_files [--rows 200000] [--rounds 3] [--databases sqlite,postgresql]
    python -m benchmarks.batch_files --upload-mib 1024

Each turn goes from the file on the disk to all results in a file. The `openai` client uploads,
makes a batch, polls, and downloads. `Client` submits and polls; the results come from the job's
`/output`, which is as quick as a job's results can be had. The engine takes no time.
`--upload-mib` uploads one file of that size instead, and says how much memory each process took.
Writes `benchmarks/results/batch-files-<date>.json`, or `upload-memory-<date>.json`.
"""

import json
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import openai

from benchmarks.control_plane.databases import fresh_database, measure_each, parser
from benchmarks.control_plane.nightjar_side import deployment
from benchmarks.control_plane.requests import write_jobs
from benchmarks.control_plane.services import Deployment
from benchmarks.control_plane.watch import Watch
from benchmarks.writing import RESULTS, today
from nightjar.pipeline.client.blocking import Client

MODULE = "benchmarks.batch_files"
POLL_EVERY_S = 0.1
RATIO_ASKED, RATIO_AIM, UPLOAD_MIB_ASKED = 0.95, 1.0, 300
_WARM_UP_ROWS = 2_000
_PADDING = "x" * 1_000
_ENDS = ("completed", "failed", "expired", "cancelled")


def by_batch(url: str, source: Path, out: Path) -> dict[str, float]:
    """The seconds of each part of a batch, with the `openai` client."""
    clock = _Parts()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600.0) as client:
        with source.open("rb") as stream:
            file_id = client.files.create(file=stream, purpose="batch").id
        clock.note("upload")
        batch_id = client.batches.create(
            input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
        ).id
        while (batch := client.batches.retrieve(batch_id)).status not in _ENDS:
            time.sleep(POLL_EVERY_S)
        if batch.output_file_id is None or batch.error_file_id is not None:
            raise SystemExit(f"the batch ended badly: {batch.to_json()}")
        ended = float(batch.finalizing_at or 0), float(batch.completed_at or 0)
        clock.note("batch")
        with client.files.with_streaming_response.content(batch.output_file_id) as answer:
            answer.stream_to_file(out)
        clock.note("download")
    return clock.parts() | {"finalizing": ended[1] - ended[0]}


def by_job(url: str, source: Path, out: Path) -> dict[str, float]:
    """The seconds of each part of a native job, with Nightjar's own client."""
    clock = _Parts()
    with Client(url) as client:
        job = client.submit(source)
        clock.note("upload")
        while not job.status().is_over:
            time.sleep(POLL_EVERY_S)
        clock.note("job")
    with httpx.stream("GET", f"{url}/v1/jobs/{job.id}/output", timeout=600.0) as answer:
        answer.raise_for_status()
        with out.open("wb") as stream:
            for piece in answer.iter_bytes():
                stream.write(piece)
    clock.note("download")
    return clock.parts()


WAYS: dict[str, Callable[[str, Path, Path], dict[str, float]]] = {
    "batch": by_batch,
    "job": by_job,
}


class _Parts:
    """Measures parts that follow each other, and their sum."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._parts: dict[str, float] = {}

    def note(self, name: str) -> None:
        now = time.monotonic()
        self._parts[name], self._last = round(now - self._last, 2), now

    def parts(self) -> dict[str, float]:
        return self._parts | {"seconds": round(self._last - self._began, 2)}


def compare(running: Deployment, args: Namespace, folder: Path) -> dict[str, Any]:
    """Both ways by turns, each of them first in every second round; their rows/s and the ratio."""
    (warm_up,) = write_jobs(folder, args.model, _WARM_UP_ROWS, _WARM_UP_ROWS)
    for way in WAYS.values():
        way(running.api_url, warm_up, folder / "warm-up.jsonl")
    (source,) = write_jobs(folder, args.model, args.rows, args.rows)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for number in range(args.rounds):
        for name in sorted(WAYS, reverse=number % 2 == 1):
            out = folder / f"results-{name}-{number}.jsonl"
            turns[name].append(WAYS[name](running.api_url, source, out))
            with out.open("rb") as stream:
                if (lines := sum(1 for _ in stream)) != args.rows:
                    raise SystemExit(f"{out} has {lines} lines, not {args.rows}")
            out.unlink()
            print(name, turns[name][-1], flush=True)
    rates = {
        name: median(args.rows / turn["seconds"] for turn in found) for name, found in turns.items()
    }
    ratios = [
        job["seconds"] / batch["seconds"]
        for batch, job in zip(turns["batch"], turns["job"], strict=True)
    ]
    return {
        "rows": args.rows,
        "file_mib": round(source.stat().st_size / 2**20, 1),
        "rows_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "ratio": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "turns": turns,
    }


def upload(running: Deployment, args: Namespace, folder: Path) -> dict[str, Any]:
    """One upload of `args.upload_mib` MiB, with the memory of every process."""
    body = {"prompt": _PADDING, "max_tokens": 1}
    line = {"custom_id": "row", "method": "POST", "url": "/v1/completions", "body": body}
    piece = (json.dumps(line) + "\n").encode() * 1_000
    source, size = folder / "large.jsonl", args.upload_mib << 20
    with source.open("wb") as stream:
        while stream.tell() + len(piece) < size - 4_096:  # room for the form around it
            stream.write(piece)
    watch = Watch(running.processes(), running.broker_bytes, shared=False)
    with watch, openai.OpenAI(base_url=f"{running.api_url}/v1", api_key="none") as client:
        began = time.monotonic()
        with source.open("rb") as stream:
            made = client.files.create(file=stream, purpose="batch", timeout=3_600.0)
        seconds = time.monotonic() - began
    if made.bytes != source.stat().st_size:
        raise SystemExit("the file is not whole")
    return {
        "file_mib": round(made.bytes / 2**20, 1),
        "seconds": round(seconds, 1),
        "memory": watch.memory(),
    }


def measure(kind: str, args: Namespace, work: Path) -> dict[str, Any]:
    """All figures with one database."""
    folder = work / kind
    with (
        fresh_database(kind, folder) as (url, _),
        deployment(url, args.model, folder / "logs") as running,
    ):
        return (upload if args.upload_mib else compare)(running, args, folder)


def main() -> None:
    options = parser(MODULE, __doc__)
    options.add_argument("--rows", type=int, default=200_000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--upload-mib", type=int, default=0)
    args = options.parse_args()
    if args.upload_mib and args.out is None:
        args.out = RESULTS / f"upload-memory-{today()}.json"
    asked = {"ratio": RATIO_ASKED, "aim": RATIO_AIM, "upload_mib": UPLOAD_MIB_ASKED}
    measure_each(MODULE, args, measure, {"asked": asked})


if __name__ == "__main__":
    main()

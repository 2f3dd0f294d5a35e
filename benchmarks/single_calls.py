"""Latency of single calls, status polls and first results, with a fake engine.

    python -m benchmarks.single_calls [--calls 400] [--databases sqlite,postgresql]

All processes of a deployment run, and the engine takes no time, so that what is measured is
Nightjar's own part. Prints a table and writes `benchmarks/results/single-calls-<date>.json`.
"""

import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks import http_load
from benchmarks.control_plane.databases import fresh_database, measure_each, parser
from benchmarks.control_plane.nightjar_side import deployment
from benchmarks.control_plane.requests import write_jobs
from benchmarks.control_plane.services import wait_until
from benchmarks.control_plane.watch import percentile
from benchmarks.http_load import Load
from nightjar.pipeline.client.blocking import Client, Job

MODULE = "benchmarks.single_calls"
CALLS_A_SECOND = 20.0
POLLS_A_SECOND = 200.0
FIRST_ROWS = 7  # jobs whose first row is waited for
FIRST_ROW_JOB = 1_000  # rows of each
_PATIENCE_S = 120.0
_LOOK_EVERY_S = 0.002

# Figure, what it is called in the table, the limit and the aim in milliseconds.
GOALS = (
    ("calls", "p50_ms", "single calls, p50", 30, 10),
    ("calls", "p99_ms", "single calls, p99", 100, 40),
    ("calls_beside_bulk", "p50_ms", "the same beside a bulk job, p50", None, None),
    ("calls_beside_bulk", "p99_ms", "the same beside a bulk job, p99", 300, 100),
    ("polls", "p99_ms", "status polls, p99", 50, 15),
    ("polls_beside_bulk", "p99_ms", "the same beside a bulk job, p99", None, None),
    ("first_row", "p50_ms", "submit to first row readable, p50", 2_000, 500),
    ("first_row", "max_ms", "the same, slowest", 2_000, 500),
)


def send(load: Load) -> dict[str, Any]:
    """Send the load; return its latencies."""
    return _summary(http_load.send(load))


def _summary(latencies_s: list[float]) -> dict[str, Any]:
    figures = {"p50_ms": percentile(latencies_s, 0.5), "p99_ms": percentile(latencies_s, 0.99)}
    figures["max_ms"] = max(latencies_s)
    return {"count": len(latencies_s)} | {k: round(v * 1e3, 1) for k, v in figures.items()}


def first_rows(api_url: str, folder: Path, model: Path) -> dict[str, Any]:
    """From the submission of a job to its first readable result, several times."""
    (path,) = write_jobs(folder, model, FIRST_ROW_JOB, FIRST_ROW_JOB)
    latencies_s = []
    with Client(api_url) as client, httpx.Client(base_url=api_url) as http:
        for _ in range(FIRST_ROWS):
            began = time.monotonic()
            job = client.submit(path)
            wait_until(partial(_first, http, job.id), every_s=_LOOK_EVERY_S)
            latencies_s.append(time.monotonic() - began)
            wait_until(partial(_is_over, job), every_s=_LOOK_EVERY_S)
    return _summary(latencies_s) | {"rows": FIRST_ROW_JOB}


def _first(http: httpx.Client, job_id: str) -> list[object]:
    query: dict[str, str | int] = {"limit": 1, "order": "landed"}
    answer = http.get(f"/v1/jobs/{job_id}/results", params=query).raise_for_status().json()
    found: list[object] = answer["data"]
    return found


def _is_over(job: Job) -> bool:
    return job.status().is_over


def measure(kind: str, args: Namespace, work: Path) -> dict[str, Any]:
    """All figures with one database."""
    folder = work / kind
    with (
        fresh_database(kind, folder) as (url, _),
        deployment(url, args.model, folder / "logs") as running,
    ):
        body: dict[str, object] = {"prompt": "오늘 저녁", "max_tokens": 16, "temperature": 0}
        calls = Load("POST", f"{running.api_url}/v1/completions", body, CALLS_A_SECOND, args.calls)
        figures: dict[str, Any] = {"calls": send(calls)}
        figures["first_row"] = first_rows(running.api_url, folder, args.model)
        with Client(running.api_url) as client:
            listed = httpx.get(f"{running.api_url}/v1/jobs").raise_for_status().json()
            polled = listed["data"][0]["id"]
            count = int(args.calls * POLLS_A_SECOND / CALLS_A_SECOND)
            polled_url = f"{running.api_url}/v1/jobs/{polled}"
            polls = Load("GET", polled_url, None, POLLS_A_SECOND, count // 2)
            figures["polls"] = send(polls)
            for name, load in (("calls", calls), ("polls", polls)):
                figures[f"{name}_beside_bulk"] = _beside_bulk(client, load, folder, args)
    print(kind, table(figures), sep="\n", flush=True)
    return figures


def _beside_bulk(client: Client, load: Load, folder: Path, args: Namespace) -> dict[str, Any]:
    """The load while a bulk job is planned and computed; says how much of the job that was."""
    (path,) = write_jobs(folder, args.model, args.bulk_rows, args.bulk_rows)
    job = client.submit(path)
    began = time.monotonic()
    figures = send(load)
    completed = job.status().counts.completed
    figures["bulk"] = {
        "rows": args.bulk_rows,
        "ended_meanwhile": completed,
        "rows_per_s": round(completed / (time.monotonic() - began), 1),
    }
    job.cancel()
    wait_until(partial(_is_over, job))
    return figures


def table(figures: dict[str, Any]) -> str:
    """One database's figures beside their limits and aims."""
    lines = [f"{'figure':<36}{'ms':>9}{'limit':>9}{'aim':>9}"]
    for group, name, words, limit, aim in GOALS:
        bounds = "".join(f"{'' if bound is None else bound:>9}" for bound in (limit, aim))
        lines.append(f"{words:<36}{figures[group][name]:>9}{bounds}")
    return "\n".join(lines)


def arguments(given: list[str] | None = None) -> Namespace:
    """What to measure."""
    found = parser(MODULE, __doc__)
    found.add_argument("--calls", type=int, default=400)
    found.add_argument("--bulk-rows", type=int, default=100_000)
    return found.parse_args(given)


def main() -> None:
    about = {"calls_a_second": CALLS_A_SECOND, "polls_a_second": POLLS_A_SECOND}
    measure_each(MODULE, arguments(), measure, about)


if __name__ == "__main__":
    main()

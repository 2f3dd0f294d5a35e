"""The control plane's figures: submit, encode, pack, dispatch, claim, finish, without a model.

    python -m benchmarks.control_plane [--requests 50000] [--databases sqlite,postgresql]

Each database is measured with Nightjar and with plain Celery, one after the other. Writes
`benchmarks/results/control-plane-<date>.json`.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.control_plane import beside, celery_side, nightjar_side
from benchmarks.control_plane.databases import fresh_database, measure_each, parser
from benchmarks.control_plane.requests import MAX_TOKENS, PROMPT_TOKENS, write_jobs

MODULE = "benchmarks.control_plane"


def measure(kind: str, args: Namespace, work: Path) -> dict[str, Any]:
    """One database: Nightjar, then plain Celery."""
    figures: dict[str, Any] = {}
    folder = work / f"{kind}-nightjar"
    with (
        fresh_database(kind, folder) as (url, servers),
        nightjar_side.deployment(url, args.model, folder / "logs") as running,
    ):
        files = write_jobs(folder, args.model, args.requests, args.job_requests)
        figures["nightjar"] = nightjar_side.measure(running, servers, files, args.requests)
        if args.bulk_rows:
            figures["beside_bulk"] = beside.measure(
                running, url, folder, args.model, args.bulk_rows
            )
    if args.long_rows:  # a planner of its own: memory that the other figures took is not given back
        folder = work / f"{kind}-long-rows"
        with (
            fresh_database(kind, folder) as (url, _),
            nightjar_side.deployment(url, args.model, folder / "logs") as running,
        ):
            figures["long_rows"] = beside.measure_long_rows(running, folder, args.long_rows)
    if args.celery_requests:
        folder = work / f"{kind}-celery"
        with fresh_database(kind, folder) as (url, servers):
            logs, count = folder / "logs", args.celery_requests
            plain = celery_side.measure(url, servers, args.model, logs, count)
        figures["plain_celery"] = plain
        ratio = figures["nightjar"]["requests_per_s"] / plain["requests_per_s"]
        figures["over_plain_celery"] = round(ratio, 2)
    return figures


def arguments(given: list[str] | None = None) -> Namespace:
    """What to measure."""
    found = parser(MODULE, __doc__)
    for name, default, said in (
        ("--requests", 50_000, "in all"),
        ("--job-requests", 10_000, "requests in one job"),
        ("--celery-requests", 5_000, "0: without Celery"),
        ("--bulk-rows", 150_000, "in each of two jobs beside urgent ones; 0: none"),
        ("--long-rows", 48, "rows of 4 MB; 0: none"),
    ):
        found.add_argument(name, type=int, default=default, help=said)
    return found.parse_args(given)


def main() -> None:
    about = {"prompt_tokens": PROMPT_TOKENS, "max_tokens": MAX_TOKENS}
    measure_each(MODULE, arguments(), measure, about)


if __name__ == "__main__":
    main()

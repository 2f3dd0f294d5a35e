"""The control plane's figures: submit, encode, pack, dispatch, claim, finish, without a model.

Each database is measured with Nightjar and with plain Celery, one after the other.
"""

from argparse import Namespace
from pathlib import Path

from benchmarks.control_plane import beside, celery_side, nightjar_side
from benchmarks.control_plane.requests import MAX_TOKENS, PROMPT_TOKENS, write_jobs
from benchmarks.control_plane.services import deployment, fresh_database
from benchmarks.harness import DATABASES, Benchmark, Figures


def measure(args: Namespace, work: Path) -> Figures:
    """One database: Nightjar, then plain Celery."""
    figures: Figures = {}
    folder = work / "nightjar"
    with deployment(args.way, folder, args.model) as running:
        files = write_jobs(folder, args.model, args.requests, args.job_requests)
        figures["nightjar"] = nightjar_side.measure(running, files, args.requests)
        if args.bulk_rows:
            figures["beside_bulk"] = beside.measure(running, folder, args.model, args.bulk_rows)
    if args.long_rows:  # a planner of its own: memory that the other figures took is not given back
        folder = work / "long-rows"
        with deployment(args.way, folder, args.model) as running:
            figures["long_rows"] = beside.measure_long_rows(running, folder, args.long_rows)
    if args.metrics_rounds:
        figures["metrics"] = nightjar_side.measure_metrics(args, work / "metrics")
    if args.celery_requests:
        folder = work / "celery"
        with fresh_database(args.way, folder) as database:
            plain = celery_side.measure(database, args.model, folder, args.celery_requests)
        figures["plain_celery"] = plain
        ratio = figures["nightjar"]["requests_per_s"] / plain["requests_per_s"]
        figures["over_plain_celery"] = round(ratio, 2)
    return figures


OPTIONS = {
    "--requests": (50_000, "in all"),
    "--job-requests": (10_000, "requests in one job"),
    "--celery-requests": (5_000, "0: without Celery"),
    "--bulk-rows": (150_000, "in each of two jobs beside urgent ones; 0: none"),
    "--long-rows": (48, "rows of 4 MB; 0: none"),
    "--metrics-rounds": (0, "with metrics and without, by turns; 0: none"),
}
ABOUT = {"prompt_tokens": PROMPT_TOKENS, "max_tokens": MAX_TOKENS}
BENCHMARK = Benchmark("control_plane", __doc__, measure, DATABASES, options=OPTIONS, about=ABOUT)

if __name__ == "__main__":
    BENCHMARK.main()

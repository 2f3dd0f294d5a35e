"""How long the web page takes over many jobs and a large one, and how many bytes it sends.

A database holds many small jobs and one large job that runs. `nightjar api` serves the page over
it. One client asks for each page again and again and takes the answers compressed, as browsers do.
Times are those of the client on the same machine, so they are a little longer than the server's
own. `assets_bytes` is what a first visit loads besides.
"""

import re
from argparse import Namespace
from contextlib import closing
from pathlib import Path

import httpx

from benchmarks.control_plane.services import fresh_database
from benchmarks.control_plane.watch import latencies
from benchmarks.harness import DATABASES, Benchmark, Figures, seconds_of
from nightjar.jobs.store import Store
from tests.api_process import running_api
from tests.bulk_jobs import later_micro_batches, old_jobs, running_job

WARM_UP = 5
_ASSET = re.compile(r'(?:src|href)="(/ui/static/[^"]+)"')


def pages(job_id: str, rows: int) -> dict[str, str]:
    """The paths of the pages, and of the parts that they load later."""
    job, late = f"/ui/jobs/{job_id}", rows // 2
    return {
        "jobs": "/ui/",
        "jobs_of_a_state": "/ui/?status=failures",
        "search": "/ui/?q=nightly-77",
        "older_jobs": "/ui/?after=job_00105000",
        "job": job,
        "charts": f"{job}/figures",
        "results": f"{job}/results?from={late}",
        "failures": f"{job}/failures?from={late}",
        "question": f"{job}/confirm/cancel",
        "workers": "/ui/workers",
        "queues": "/ui/queues",
        "schedules": "/ui/schedules",
        "tenants": "/ui/tenants",
    }


def measure(args: Namespace, folder: Path) -> Figures:
    """The times and the bytes of each page."""
    with fresh_database(args.way, folder) as database:
        with closing(Store(database.url)) as store:
            store.migrate()
            old_jobs(store, args.jobs)
            job_id = running_job(store, args.rows)
            later_micro_batches(store, args.jobs)
            with store.database.engine.begin() as connection:
                connection.exec_driver_sql("ANALYZE")
        with (
            running_api(database.url, args.model, folder) as api,
            httpx.Client(base_url=api.url, timeout=60.0) as client,
        ):
            found = {
                name: timed(client, path, args.times)
                for name, path in pages(job_id, args.rows).items()
            }
            assets = _ASSET.findall(client.get(f"/ui/jobs/{job_id}").text)
            loaded = sum(fetched(client, path) for path in dict.fromkeys(assets))
    return {
        "rows": args.rows,
        "jobs": args.jobs,
        "pages": found,
        "assets_bytes": loaded,
        "slowest_p99_ms": max(one["p99_ms"] for one in found.values()),
        "most_bytes": max(one["bytes"] for one in found.values()),
    }


def timed(client: httpx.Client, path: str, times: int) -> Figures:
    """The latencies of a page, and the bytes of its largest answer."""
    sizes: list[int] = []
    seconds = [
        seconds_of(lambda: sizes.append(fetched(client, path))) for _ in range(WARM_UP + times)
    ]
    return {**latencies(seconds[WARM_UP:]), "bytes": max(sizes)}


def fetched(client: httpx.Client, path: str) -> int:
    """Read an answer to its end; returns its bytes as they were sent."""
    answer = client.get(path)
    answer.raise_for_status()
    return answer.num_bytes_downloaded


OPTIONS = {
    "--rows": (1_000_000, "of the large job"),
    "--jobs": (10_000, "small jobs beside it"),
    "--times": (200, "requests of each page"),
}
BENCHMARK = Benchmark("page_times", __doc__, measure, DATABASES, OPTIONS)

if __name__ == "__main__":
    BENCHMARK.main()

"""Whether a database stays flat: a month of nights, each submitted, computed and purged in turn.

Each night has two jobs. One is computed through the store as workers do it; the other is written by
the database itself, so that the night has its rows in a short time. Then the planner's sweep purges
what ended more than `--keep-nights` nights ago. Nights are dated back, and take seconds. PostgreSQL
gets between two nights the VACUUM that autovacuum does by day.
"""

import time
from argparse import Namespace
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import sqlalchemy as sa

from benchmarks.control_plane.requests import body, plan
from benchmarks.control_plane.services import fresh_database
from benchmarks.harness import DATABASES, Benchmark, Figures
from nightjar.jobs.lines.parsing import validate_body
from nightjar.jobs.purge_records import PurgeScope
from nightjar.jobs.records import NewJob, NewRequest, NewResult
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.submission import new_parted_job_id
from nightjar.jobs.store.tables import job
from tests.bulk_jobs import finished_job

DAY_S = 86_400.0
LAST_NIGHT_DAYS = 3.0  # before today: a partition of today is not dropped
EACH = 64
MODEL = "f" * 64
ANSWER = "in the old barn, where it sleeps by day and waits for the night " * 3


def measure(args: Namespace, folder: Path) -> Figures:
    """The size of the database after nights, and the seconds of the purges."""
    sizes: dict[str, float] = {}
    purges = []
    with (
        fresh_database(args.way, folder) as database,
        closing(Store(database.url)) as store,
    ):
        store.migrate()
        for night in range(1, args.nights + 1):
            age = LAST_NIGHT_DAYS + args.nights - night
            compute_night(store, args.computed, age)
            finished_job(store, args.rows - args.computed, days=age, made_days=age)
            began = time.perf_counter()
            purge(store, age + args.keep_nights - 0.5)
            purges.append(time.perf_counter() - began)
            tidy(store)
            if night % 10 == 0 or night == args.keep_nights:
                sizes[f"mib_after_{night}"] = round(size_of(store, folder) / 2**20, 1)
    steady = purges[args.keep_nights + 1 :]
    return {
        "nights": args.nights,
        "kept_nights": args.keep_nights,
        "rows_a_night": args.rows,
        "computed_rows_a_night": args.computed,
        **sizes,
        "purge_s_a_night": round(sum(steady) / len(steady), 2),
    }


def compute_night(store: Store, rows: int, age_days: float) -> None:
    """A job of that age that is submitted, planned, claimed and finished."""
    asked = validate_body(RequestKind.GENERATE, body("the owl hunts at night " * 16))
    new = NewJob("tiny", id=new_parted_job_id(age_days * DAY_S), merge_equal=False)
    with store.jobs.submit(new) as submission:
        submission.add(
            NewRequest(n, n + 1, f"row-{n}", RequestKind.GENERATE, asked) for n in range(rows)
        )
    for ref in plan(store, submission.job_id, rows, EACH, MODEL):
        claimed = store.leases.claim(ref.id, ref.epoch, "worker", MODEL)
        assert claimed is not None
        results = [
            NewResult(one.id, 200, {"text": ANSWER}, prompt_tokens=80, completion_tokens=50)
            for one in claimed.requests
        ]
        assert store.leases.finish(claimed.id, claimed.epoch, "worker", results)
    store.shares.settle()
    ended = sa.update(job).where(job.c.id == submission.job_id)
    moment = datetime.now(UTC) - timedelta(days=age_days)
    store.database.write(lambda connection: connection.execute(ended.values(finished_at=moment)))


def purge(store: Store, keep_days: float) -> None:
    """Sweep until nothing is left to purge."""
    while not store.retention.sweep(PurgeScope(keep_s=keep_days * DAY_S)).is_done:
        pass


def tidy(store: Store) -> None:
    """What autovacuum does by day; on SQLite what is in its log comes into the file."""
    if store.database.is_sqlite:
        with store.database.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        return
    apart = store.database.engine.execution_options(isolation_level="AUTOCOMMIT")
    with apart.connect() as connection:
        connection.exec_driver_sql("VACUUM ANALYZE job, micro_batch, micro_batch_tokens, landing")


def size_of(store: Store, folder: Path) -> int:
    """The bytes of the database."""
    if store.database.is_sqlite:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    with store.database.reading() as connection:
        return int(connection.scalar(sa.text("SELECT pg_database_size(current_database())")))


OPTIONS = {
    "--rows": (100_000, "a night"),
    "--computed": (2_000, "of them through the store, as workers do it"),
    "--nights": (30, "of the month"),
    "--keep-nights": (7, "that are kept"),
}
BENCHMARK = Benchmark("month", __doc__, measure, DATABASES, options=OPTIONS)

if __name__ == "__main__":
    BENCHMARK.main()

"""Fair shares with real processes: tenants of weights 3 and 1, and a third that floods.

    python -m benchmarks.fair_shares [--seconds 60] [--database sqlite]

Real parts: the broker, the planner, beat and a GPU worker, whose engine is the fake one. The flood
of small jobs is submitted first and runs alone for a while. Then come "gold" (weight 3, long rows)
and "silver" (weight 1, short rows), a job each. Later gold is paused, and then resumed. In each
phase the shares of the computed tokens are counted. Shares are ratios: on a loaded machine all
phases compute less, so the windows of a phase are fewer and its shares rougher. Writes
`benchmarks/results/fair-shares-<date>.json`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

import nightjar
from benchmarks.control_plane.__main__ import DATABASES, fresh_database
from benchmarks.machine import describe
from benchmarks.writing import RESULTS, today, write_json
from nightjar.jobs.lines.schemas import validate_body
from nightjar.jobs.records import NewJob, NewRequest
from nightjar.jobs.states import MicroBatchState, RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.account_tables import tenant as tenant_table
from nightjar.pipeline.embedded.broker import broker_command, broker_url, wait_for_broker
from nightjar.pipeline.embedded.processes import Service
from nightjar.pipeline.queue.commands import WorkerRole, beat_command, worker_command
from nightjar.pipeline.settings import Settings

MODEL = Path("examples/demo_model")
STEP_S = 0.05  # of the fake engine: computing is what limits, as it is with a model
MICRO_BATCH_REQUESTS = 4
# Small, so that a phase of a minute is many windows long.
WINDOW, THREADS = 4, 1
SAMPLE_S = 1.0
GRACE_S = 20.0
WEIGHTS = {"gold": 3.0, "silver": 1.0, "flood": 1.0}
WORD = "night "
# Words in a prompt and most tokens of an answer.
LONG, SHORT, TINY = (24, 64), (4, 16), (8, 24)
FLOOD_JOBS, FLOOD_ROWS = 150, 100


@contextmanager
def services(database_url: str, logs: Path) -> Iterator[None]:
    """Broker, planner, beat and GPU worker; they have ended when the block has."""
    private = Path(tempfile.mkdtemp(prefix="nightjar-"))
    settings = Settings.read(model=MODEL.resolve(), engine="fake")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NIGHTJAR_")} | {
        "NIGHTJAR_DATABASE_URL": database_url,
        "NIGHTJAR_BROKER_URL": broker_url(private),
        "NIGHTJAR_MODEL": str(MODEL.resolve()),
        "NIGHTJAR_ENGINE": "fake",
        "NIGHTJAR_FAKE_STEP_S": str(STEP_S),
        "NIGHTJAR_DISPATCH_WINDOW": str(WINDOW),
        "NIGHTJAR_WORKER_THREADS": str(THREADS),
        "NIGHTJAR_PLAN_CHUNK_REQUESTS": "512",
        "NIGHTJAR_MICRO_BATCH_REQUESTS": str(MICRO_BATCH_REQUESTS),
        "PYTHONPATH": str(Path(nightjar.__file__).parents[1]),
    }
    commands = {
        "broker": broker_command(private),
        "gpu-worker": worker_command(WorkerRole.COMPUTE, settings),
        "planner": worker_command(WorkerRole.PLAN, settings),
        "beat": beat_command(),
    }
    started: list[Service] = []
    try:
        for name, command in commands.items():
            one = Service(name, command, logs / f"{name}.log", environment, private)
            one.start()
            started.append(one)
            if name == "broker":
                wait_for_broker(private, one)
        yield
    finally:
        for one in reversed(started):
            one.stop(GRACE_S)
        shutil.rmtree(private, ignore_errors=True)


def set_weights(store: Store) -> None:
    rows = [
        {"name": name, "weight": weight, "created_at": datetime.now(UTC)}
        for name, weight in WEIGHTS.items()
    ]
    store.database.write(lambda connection: connection.execute(sa.insert(tenant_table), rows))


def submit(store: Store, tenant: str, rows: int, size: tuple[int, int], seed: int = 0) -> str:
    """A job of the tenant; no two of its rows are equal."""
    words, most = size
    kind = RequestKind.GENERATE
    bodies = (
        validate_body(kind, {"prompt": f"{seed} {n} {WORD * words}", "max_tokens": most})
        for n in range(rows)
    )
    with store.jobs.submit(NewJob("demo", tenant=tenant)) as submission:
        submission.add(
            NewRequest(n, n + 1, f"row-{n}", kind, body) for n, body in enumerate(bodies)
        )
    return submission.job_id


def computed(store: Store) -> Counter[str]:
    """Tokens computed for each tenant; the planner's sweep charges them once a second."""
    return Counter({one.tenant: one.computed_tokens for one in store.shares.all()})


def in_flight(store: Store, job_id: str) -> int:
    """Micro-batches of the job that are in the broker or leased."""
    counts = store.jobs.get_in_detail(job_id)[1]
    return counts[MicroBatchState.DISPATCHED] + counts[MicroBatchState.LEASED]


def phase(name: str, store: Store, seconds: float) -> dict[str, Any]:
    """Sample the computed tokens for so long, and say what came of each tenant."""
    before, began = computed(store), time.monotonic()
    samples = []
    while (passed := time.monotonic() - began) < seconds:
        time.sleep(SAMPLE_S)
        samples.append({"at_s": round(passed + SAMPLE_S, 1), **(computed(store) - before)})
    done = computed(store) - before
    total = done.total()
    shares = {tenant: round(done[tenant] / max(1, total), 4) for tenant in WEIGHTS}
    print(f"{name}: {total / seconds:,.0f} tokens/s, shares {shares}", flush=True)
    return {"tokens": dict(done), "shares": shares, "samples": samples}


def wait_for(what: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            raise SystemExit("nothing was computed: see the logs below build/fair-shares")
        time.sleep(0.2)


def measure(store: Store, seconds: float) -> dict[str, Any]:
    for number in range(FLOOD_JOBS):
        submit(store, "flood", FLOOD_ROWS, TINY, number)
    wait_for(lambda: computed(store)["flood"] > 0)
    phases = {"flood_alone": phase("the flood alone", store, seconds / 4)}
    submit(store, "silver", 20_000, SHORT)
    gold = submit(store, "gold", 20_000, LONG)
    wait_for(lambda: {"gold", "silver"} <= computed(store).keys())
    # What was in the window when they came is computed first.
    phases["both_have_come"] = phase("gold and silver have come", store, seconds / 4)
    phases["all_three"] = phase("all three", store, seconds)
    store.stopping.pause(gold)
    wait_for(lambda: not in_flight(store, gold))
    store.shares.settle()
    phases["gold_paused"] = phase("gold is paused", store, seconds / 2)
    store.stopping.resume(gold)
    phases["gold_back"] = phase("gold is back", store, seconds / 4)
    phases["all_three_again"] = phase("all three again", store, seconds)
    return phases


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fair_shares", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of the longest phase")
    parser.add_argument("--database", choices=DATABASES, default="sqlite")
    parser.add_argument("--work", type=Path, default=Path("build/fair-shares"))
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args(given)


def main() -> None:
    args = arguments()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    with fresh_database(args.database, args.work) as (url, _):
        store = Store(url)
        store.migrate()
        set_weights(store)
        with services(url, args.work.resolve()):
            phases = measure(store, args.seconds)
        store.close()
    record = {
        "date": today(),
        "command": shlex.join(["python", "-m", "benchmarks.fair_shares", *sys.argv[1:]]),
        "machine": describe(2, with_torch=False),
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "database": args.database,
        "weights": WEIGHTS,
        "phases": phases,
    }
    write_json(args.out or RESULTS / f"fair-shares-{today()}.json", record)


if __name__ == "__main__":
    main()

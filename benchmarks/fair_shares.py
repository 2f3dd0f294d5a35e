"""Fair shares with real processes: tenants of weights 3 and 1, and a third that floods.

    python -m benchmarks.fair_shares [--seconds 60] [--database sqlite]

All processes of a deployment run, and the engine is the fake one. The flood of small jobs is
submitted first and runs alone for a while. Then come "gold" (weight 3, long rows)
and "silver" (weight 1, short rows), a job each. Later gold is paused, and then resumed. In each
phase the shares of the computed tokens are counted. Shares are ratios: on a loaded machine all
phases compute less, so the windows of a phase are fewer and its shares rougher. Writes
`benchmarks/results/fair-shares-<date>.json`.
"""

import os
import shutil
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from benchmarks.control_plane.databases import DATABASES, fresh_database
from benchmarks.control_plane.nightjar_side import deployment
from benchmarks.control_plane.services import wait_until
from benchmarks.machine import describe
from benchmarks.writing import RESULTS, begun, parser, write_json
from nightjar.jobs.lines.schemas import validate_body
from nightjar.jobs.records import NewJob, NewRequest
from nightjar.jobs.states import MicroBatchState, RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.account_tables import tenant as tenant_table

MODULE = "benchmarks.fair_shares"
MODEL = Path("examples/demo_model")
# Computing is what limits, as it is with a model; windows are so small that a phase of a minute is
# many of them long.
SETTINGS = {
    "fake_step_s": 0.05,
    "dispatch_window": 4,
    "worker_threads": 1,
    "plan_chunk_requests": 512,
    "micro_batch_requests": 4,
}
WEIGHTS = {"gold": 3.0, "silver": 1.0, "flood": 1.0}
WORD = "night "
# Words in a prompt and most tokens of an answer.
LONG, SHORT, TINY = (24, 64), (4, 16), (8, 24)
FLOOD_JOBS, FLOOD_ROWS = 150, 100


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
    """Wait for so long, and say what was computed for each tenant meanwhile."""
    before = computed(store)
    time.sleep(seconds)
    done = computed(store) - before
    total = done.total()
    shares = {tenant: round(done[tenant] / max(1, total), 4) for tenant in WEIGHTS}
    print(f"{name}: {total / seconds:,.0f} tokens/s, shares {shares}", flush=True)
    return {"tokens": dict(done), "shares": shares}


def measure(store: Store, seconds: float) -> dict[str, Any]:
    for number in range(FLOOD_JOBS):
        submit(store, "flood", FLOOD_ROWS, TINY, number)
    wait_until(lambda: computed(store)["flood"] > 0)
    phases = {"flood_alone": phase("the flood alone", store, seconds / 4)}
    submit(store, "silver", 20_000, SHORT)
    gold = submit(store, "gold", 20_000, LONG)
    wait_until(lambda: {"gold", "silver"} <= computed(store).keys())
    # What was in the window when they came is computed first.
    phases["both_have_come"] = phase("gold and silver have come", store, seconds / 4)
    phases["all_three"] = phase("all three", store, seconds)
    store.stopping.pause(gold)
    wait_until(lambda: not in_flight(store, gold))
    store.shares.settle()
    phases["gold_paused"] = phase("gold is paused", store, seconds / 2)
    store.stopping.resume(gold)
    phases["gold_back"] = phase("gold is back", store, seconds / 4)
    phases["all_three_again"] = phase("all three again", store, seconds)
    return phases


def main() -> None:
    arguments = parser(MODULE, __doc__)
    arguments.add_argument("--seconds", type=float, default=60.0, help="of the longest phase")
    arguments.add_argument("--database", choices=DATABASES, default="sqlite")
    arguments.add_argument("--work", type=Path, default=Path("build/fair-shares"))
    args = arguments.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    with (
        fresh_database(args.database, args.work) as (url, _),
        deployment(url, MODEL, args.work, **SETTINGS),
    ):
        store = Store(url)
        set_weights(store)
        phases = measure(store, args.seconds)
        store.close()
    record = begun(MODULE) | {
        "machine": describe(2, with_torch=False),
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "database": args.database,
        "weights": WEIGHTS,
        "phases": phases,
    }
    write_json(args.out or RESULTS / f"fair-shares-{record['date']}.json", record)


if __name__ == "__main__":
    main()

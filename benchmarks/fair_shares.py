"""Fair shares with real processes: tenants of weights 3 and 1, and a third that floods.

All processes of a deployment run, and the engine is the fake one. The flood of small jobs is
submitted first and runs alone for a while. Then come "gold" (weight 3, long rows)
and "silver" (weight 1, short rows), a job each. Later gold is paused, and then resumed. In each
phase the shares of the computed tokens are counted. Shares are ratios: on a loaded machine all
phases compute less, so the windows of a phase are fewer and its shares rougher.
"""

import time
from argparse import Namespace
from collections import Counter
from pathlib import Path

from benchmarks.control_plane.requests import submit
from benchmarks.control_plane.services import deployment, wait_until
from benchmarks.harness import Benchmark, Figures
from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.store import Store
from tests.tenants import set_weight

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
# Rows of a job, words in a prompt, and most tokens of an answer.
SIZES = {"gold": (20_000, 24, 64), "silver": (20_000, 4, 16), "flood": (100, 8, 24)}
FLOOD_JOBS = 150


def submit_job(store: Store, tenant: str, seed: int = 0) -> str:
    """A job of the tenant; no two of its rows are equal."""
    rows, words, most = SIZES[tenant]
    texts = (f"{seed} {n} {'night ' * words}" for n in range(rows))
    return submit(store, texts, most, tenant=tenant)


def computed(store: Store) -> Counter[str]:
    """Tokens computed for each tenant; the planner's sweep charges them once a second."""
    return Counter({one.tenant: one.computed_tokens for one in store.shares.all()})


def in_flight(store: Store, job_id: str) -> int:
    """Micro-batches of the job that are in the broker or leased."""
    counts = store.jobs.get_in_detail(job_id)[1]
    return counts[MicroBatchState.DISPATCHED] + counts[MicroBatchState.LEASED]


def shares(store: Store, seconds: float) -> Figures:
    """Wait for so long, and say what was computed for each tenant meanwhile."""
    before = computed(store)
    time.sleep(seconds)
    done = computed(store) - before
    total = max(1, done.total())
    return {"tokens": done, "shares": {one: round(done[one] / total, 4) for one in WEIGHTS}}


def measure(args: Namespace, folder: Path) -> Figures:
    with deployment("sqlite", folder, args.model, **SETTINGS) as running:
        for name, weight in WEIGHTS.items():
            set_weight(running.system.store, name, weight)
        return {"phases": phases(running.system.store, args.seconds)}


def phases(store: Store, seconds: float) -> Figures:
    """The shares of each phase."""
    for number in range(FLOOD_JOBS):
        submit_job(store, "flood", number)
    wait_until(lambda: computed(store)["flood"] > 0)
    found = {"flood_alone": shares(store, seconds / 4)}
    submit_job(store, "silver")
    gold = submit_job(store, "gold")
    wait_until(lambda: {"gold", "silver"} <= computed(store).keys())

    # What was in the window when they came is computed first.
    found["both_have_come"] = shares(store, seconds / 4)
    found["all_three"] = shares(store, seconds)
    store.stopping.pause(gold)
    wait_until(lambda: not in_flight(store, gold))
    store.shares.settle()
    found["gold_paused"] = shares(store, seconds / 2)
    store.stopping.resume(gold)
    found["gold_back"] = shares(store, seconds / 4)
    found["all_three_again"] = shares(store, seconds)
    return found


OPTIONS = {"--seconds": (60.0, "of the longest phase")}
BENCHMARK = Benchmark("fair_shares", __doc__, measure, options=OPTIONS, about={"weights": WEIGHTS})

if __name__ == "__main__":
    BENCHMARK.main()

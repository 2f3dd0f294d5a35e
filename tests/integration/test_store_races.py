"""Several planners, dispatchers, workers and cancellers at once, in real threads and processes."""

import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nightjar.jobs.records import EncodedRequest, NewMicroBatch
from nightjar.jobs.states import JobState, RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.workers import Crash
from tests.jobs import planned, submit
from tests.outcomes import answers, codes

PROMPT = {"prompt": "a", "max_tokens": 4}


def at_once(count: int, work: Callable[[int], object]) -> list[object]:
    """Run `work(number)` in threads that begin together; raises what they raise."""
    barrier = threading.Barrier(count)

    def run(number: int) -> object:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_two_planners_plan_each_request_once(store: Store) -> None:
    job_id = submit(store, [PROMPT] * 120)

    def plan(number: int) -> int:
        planned_here = 0
        while queued := store.backlog.queued_requests(job_id, 30):
            size = 3 + number  # the planners do not agree on the micro-batches
            groups = [queued[start : start + size] for start in range(0, len(queued), size)]
            batches = [
                NewMicroBatch(RequestKind.GENERATE, 32, [item.id for item in group], 3)
                for group in groups
            ]
            encoded = [EncodedRequest(item.id, [[1]]) for item in queued]
            planned_here += sum(
                ref.size for ref in store.planning.save_plan(job_id, encoded, batches, [])
            )
        return planned_here

    assert sum(at_once(3, plan)) == 120
    refs = store.planning.dispatchable(1_000)
    assert sum(ref.size for ref in refs) == 120
    members = [
        request.id
        for ref in refs
        if (claimed := store.leases.claim(ref.id, ref.epoch, "worker"))
        for request in claimed.requests
    ]
    assert len(members) == len(set(members)) == 120


def test_of_many_claimers_one_wins(store: Store) -> None:
    _, refs = planned(store, 10)
    for ref in refs:
        claims = at_once(
            4, lambda number, ref=ref: store.leases.claim(ref.id, ref.epoch, f"w{number}")
        )
        assert sum(claim is not None for claim in claims) == 1


def test_of_many_finishers_one_lands(store: Store) -> None:
    job_id, (ref,) = planned(store, 20, each=20)
    claimed = store.leases.claim(ref.id, 0, "worker")
    assert claimed is not None
    landed = at_once(4, lambda _: store.leases.finish(ref.id, 0, "worker", answers(claimed)))
    assert sorted(landed) == [False, False, False, True]
    job = store.jobs.get(job_id)
    assert (job.completed, job.prompt_tokens, job.state) == (20, 60, JobState.COMPLETED)


def test_the_last_of_many_finishers_ends_the_job(store: Store) -> None:
    job_id, refs = planned(store, 24, each=2)
    claims = [store.leases.claim(ref.id, 0, "worker") for ref in refs]

    def finish(number: int) -> list[bool]:
        mine = [claim for claim in claims[number::4] if claim]
        return [store.leases.finish(claim.id, 0, "worker", answers(claim)) for claim in mine]

    at_once(4, finish)
    job = store.jobs.get(job_id)
    assert (job.completed, job.state) == (24, JobState.COMPLETED)


def test_a_storm_of_workers_sweepers_and_a_canceller(store: Store) -> None:
    """Whatever happens in between, every request has one outcome, and the counters agree."""
    jobs = [planned(store, 24, each=3)[0] for _ in range(3)]
    crash = Crash("the worker died", allowed=1_000)

    def work(number: int) -> None:
        dice, owner = random.Random(number), f"worker-{number}"
        while refs := store.planning.dispatchable(100) + store.planning.dispatched():
            ref = dice.choice(refs)
            store.planning.mark_dispatched([ref])
            claimed = store.leases.claim(ref.id, ref.epoch, owner)
            if claimed is None:
                continue
            deed = dice.random()
            if deed < 0.2:
                store.suspects.add_owner(owner, crash)  # as if the sweeper thought it dead
            if deed < 0.3:
                store.leases.give_back(claimed.id, claimed.epoch, owner)
            store.leases.finish(claimed.id, claimed.epoch, owner, answers(claimed))

    def act(number: int) -> None:
        if number < 4:
            work(number)
        elif number == 4:
            store.stopping.cancel(jobs[1])
        else:
            store.planning.requeue(store.planning.dispatched())

    at_once(6, act)
    work(99)
    store.stopping.finish()
    for job_id in jobs:
        job = store.jobs.get(job_id)
        results = store.results.read(job_id)
        assert [item.index for item in results] == list(range(24))
        counted = Counter(codes(results))
        assert (job.completed, job.cancelled) == (counted[None], counted["cancelled"])
        expected = JobState.CANCELLED if job_id == jobs[1] else JobState.COMPLETED
        assert job.state is expected
        assert job.prompt_tokens == 3 * job.completed


WORKER = """
import sys
from nightjar.jobs.workers import ComputeSeconds
from nightjar.jobs.store import Store
from tests.outcomes import answers
store, owner = Store(sys.argv[1]), sys.argv[2]
while refs := store.planning.dispatchable(1000):
    for ref in refs:
        store.heartbeats.beat(owner, ComputeSeconds())
        claimed = store.leases.claim(ref.id, ref.epoch, owner)
        if claimed:
            store.leases.finish(claimed.id, claimed.epoch, owner, answers(claimed))
store.close()
"""


def test_worker_processes_share_a_job(store: Store, database_url: str) -> None:
    job_id, _ = planned(store, 60, each=2)
    root = Path(__file__).parents[2]
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, database_url, f"w{number}"], cwd=root)
        for number in range(2)
    ]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    assert store.jobs.get(job_id).state is JobState.COMPLETED
    assert len(store.results.read(job_id)) == 60

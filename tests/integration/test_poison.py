"""Poison: requests that end, hang or break what computes them, over real processes that really die.

The engine is the shipped fake one: its markers do to the compute process what a broken kernel, a
deadlock or too little memory do, and its answers are functions of the request alone.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from nightjar.checkpoints import ModelDirectory
from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.worker.launcher import Launcher
from nightjar.gpu_worker.worker.served import ServedModel
from nightjar.gpu_worker.worker.worker import GpuWorker, Outcome
from nightjar.jobs.records import MicroBatchRef, ResultRecord
from nightjar.jobs.states import JobState, MicroBatchState
from nightjar.jobs.store import Store
from nightjar.pipeline.queue.sweeper import Sweeper
from tests.jobs import planned_texts
from tests.processes import all_ended, find_children, wait_until

THREADS = 3
PATIENCE_S = 200.0
ROOT = Path(__file__).parents[2]


@dataclass
class Place:
    """A worker with its launcher, and how jobs come to it."""

    store: Store
    launcher: Launcher
    worker: GpuWorker
    model: Path

    def plan(self, texts: list[str], each: int) -> str:
        encode = ModelDirectory.open(self.model).tokenizer().encode
        return planned_texts(self.store, texts, encode, each=each)[0]

    def work(self, job_id: str) -> list[Outcome]:
        """Run whatever is ready, in the worker's threads, until the job is over."""
        outcomes: list[Outcome] = []
        deadline = time.monotonic() + PATIENCE_S
        with ThreadPoolExecutor(THREADS) as pool:
            running: list[Future[Outcome]] = []
            while not self.store.jobs.get(job_id).is_over:
                assert time.monotonic() < deadline, self.store.jobs.get_in_detail(job_id)[1]
                ready = self.store.planning.dispatchable(100)
                self.store.planning.mark_dispatched(ready)
                running += [pool.submit(self._run, ref) for ref in ready]
                time.sleep(0.02)
            outcomes += [future.result() for future in running]
        return outcomes

    def _run(self, ref: MicroBatchRef) -> Outcome:
        return self.worker.run(ref.id, ref.epoch, alone=ref.isolated)


@contextmanager
def a_place(store: Store, model: Path, *, stalled_after_s: float = 60.0) -> Iterator[Place]:
    config = ComputeConfig(model, engine="fake", stalled_after_s=stalled_after_s)
    launcher = Launcher(config, on_failure=print)
    try:
        launcher.wait_ready()
        yield Place(
            store,
            launcher,
            GpuWorker(store, [ServedModel("tiny", "", launcher)], crashes_allowed=2),
            model,
        )
    finally:
        launcher.close()


@pytest.fixture
def place(store: Store, tiny_model: Path) -> Iterator[Place]:
    with a_place(store, tiny_model) as place:
        yield place


def innocent(count: int) -> list[str]:
    return [f"row number {n}" for n in range(count)]


def texts(results: list[ResultRecord]) -> list[str | None]:
    """The answer of each row, None for a failure."""
    return [None if r.body is None else r.body["choices"][0]["text"] for r in results]


def expected(place: Place, prompts: list[str], poisoned: set[int]) -> list[str | None]:
    """What an undisturbed run answers, without the poisoned rows."""
    job_id = place.plan(prompts, each=len(prompts))
    place.work(job_id)
    answered = texts(place.store.results.read(job_id))
    assert None not in answered
    return [None if n in poisoned else text for n, text in enumerate(answered)]


def test_poisoned_requests_fail_alone_and_their_neighbours_are_answered(place: Place) -> None:
    """A suspect has the compute process for itself, whatever waits meanwhile."""
    prompts = innocent(12)
    undisturbed = expected(place, prompts, poisoned={0, 5})
    poisoned = prompts.copy()
    poisoned[0], poisoned[5] = "<poison:raise>", "before <poison:crash>"
    job_id = place.plan(poisoned, each=4)
    seen: list[tuple[int, int]] = []

    def look() -> None:
        while not place.store.jobs.get(job_id).is_over:
            leased = place.store.leases.held_by(place.worker.owner)
            seen.append((len(leased), sum(ref.isolated for ref in leased)))
            time.sleep(0.005)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        place.work(job_id)
        looking.result()
    results = place.store.results.read(job_id)
    assert texts(results) == undisturbed
    raised, crashed = results[0].error, results[5].error
    assert raised is not None
    assert raised.code == "internal_error"
    assert crashed is not None
    assert crashed.code == "compute_lost"
    assert crashed.message == (
        "computed alone 2 times and never answered; the last time the compute process was ended "
        "by SIGSEGV"
    )
    assert place.store.jobs.get(job_id).state is JobState.COMPLETED_WITH_FAILURES
    assert {count for count, isolated in seen if isolated} == {1}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("marker", "stalled_after_s", "reason"),
    [
        ("<poison:hang>", 3.0, "the compute process stalled: no step in 3 s"),
        ("<poison:memory>", 60.0, "the compute process was ended by SIGKILL"),
    ],
)
def test_poison_that_hangs_or_takes_all_memory(
    store: Store, tiny_model: Path, marker: str, stalled_after_s: float, reason: str
) -> None:
    with a_place(store, tiny_model, stalled_after_s=stalled_after_s) as place:
        prompts = innocent(2)
        undisturbed = expected(place, prompts, poisoned={1})
        job_id = place.plan([prompts[0], marker], each=2)
        place.work(job_id)
    results = store.results.read(job_id)
    assert texts(results) == undisturbed
    assert results[1].error is not None
    assert results[1].error.message.endswith(f"the last time {reason}")


def test_an_exception_costs_no_process(place: Place) -> None:
    pid = place.launcher.pid
    job_id = place.plan([*innocent(3), "<poison:raise>"], each=4)
    place.work(job_id)
    assert place.launcher.pid == pid
    assert place.store.jobs.get_in_detail(job_id)[1][MicroBatchState.SPLIT] == 0
    assert place.store.jobs.get(job_id).completed == 3


WORKER = """
import os, signal, sys
from pathlib import Path
from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.worker.heartbeat import Heartbeat
from nightjar.gpu_worker.worker.launcher import Launcher
from nightjar.gpu_worker.worker.served import ServedModel
from nightjar.gpu_worker.worker.worker import GpuWorker
from nightjar.jobs.store import Store

class Memory(Launcher):
    '''Lets the poison take the whole worker, as the kernel does where memory is short.'''
    def submit(self, asked, keys, vectors):
        if any(b"<poison:hang>" in known(message) for message in asked):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().submit(asked, keys, vectors)

def known(message):
    return b"".join(tokens[id_] for id_ in message.request.token_ids)

store = Store(sys.argv[1])
launcher = Memory(ComputeConfig(Path(sys.argv[2]), engine="fake"), on_failure=print)
from nightjar.checkpoints import ModelDirectory
tokens = ModelDirectory.open(Path(sys.argv[2])).tokenizer().token_bytes
launcher.wait_ready()
worker = GpuWorker(store, [ServedModel("tiny", "", launcher)], crashes_allowed=2)
Heartbeat(worker, every_s=0.1)
while True:
    for ref in store.planning.dispatchable(100):
        worker.run(ref.id, ref.epoch, alone=ref.isolated)
"""


@pytest.mark.slow
def test_poison_that_takes_the_worker_with_it_is_found_too(
    place: Place, database_url: str, tiny_model: Path
) -> None:
    prompts = innocent(4)
    undisturbed = expected(place, prompts, poisoned={2})
    job_id = place.plan([*prompts[:2], "<poison:hang>", *prompts[3:]], each=2)
    sweeper = Sweeper(
        place.store,
        dead_after_s=1.0,
        redispatch_after_s=60.0,
        longest_gap_s=0.5,
        deaths_allowed=2,
    )
    command = [sys.executable, "-c", WORKER, database_url, str(tiny_model)]
    process = subprocess.Popen(command, cwd=ROOT)
    deaths = 0
    deadline = time.monotonic() + PATIENCE_S
    try:
        while not place.store.jobs.get(job_id).is_over:
            assert time.monotonic() < deadline
            sweeper.sweep()
            if process.poll() is not None:
                deaths += 1
                process = subprocess.Popen(command, cwd=ROOT)
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    results = place.store.results.read(job_id)
    assert texts(results) == undisturbed
    assert results[2].error is not None
    assert "computed alone 2 times and never answered; the last time the worker" in (
        results[2].error.message
    )
    assert deaths == 3  # in company, and twice alone


def test_a_compute_process_that_hangs_ends_with_its_worker(
    place: Place, database_url: str, tiny_model: Path
) -> None:
    """It cannot see that its pipe is closed."""
    place.plan(["<poison:hang>"], each=1)
    script = WORKER.replace("launcher = Memory(", "launcher = Launcher(")
    process = subprocess.Popen(
        [sys.executable, "-c", script, database_url, str(tiny_model)], cwd=ROOT
    )
    try:
        wait_until("the claim", place.store.heartbeats.of_lease_holders)
        children = find_children(process.pid, "gpu_worker.compute")
        assert len(children) == 1
        time.sleep(0.5)  # into the hang
    finally:
        process.kill()
        process.wait()
    wait_until("the compute process to end", lambda: all_ended(children), patience_s=20)


class StoppedProcess(subprocess.Popen[bytes]):
    """A process that gets no further than its start."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.send_signal(signal.SIGSTOP)


def test_a_process_that_ends_while_it_loads_blames_no_request(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = place.plan(innocent(2), each=2)
    (ref,) = place.store.planning.dispatchable(1)
    pid = place.launcher.pid
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", StoppedProcess)
        psutil.Process(pid).kill()
        wait_until("the next process", lambda: place.launcher.pid != pid)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(place.worker.run, ref.id, 0)
        wait_until("requests in flight", lambda: place.launcher.in_flight)
        psutil.Process(place.launcher.pid).kill()
        assert running.result().outcome == "given back: not computed here"
    (again,) = place.store.planning.dispatchable(1)
    assert (again.id, again.epoch, again.isolated) == (ref.id, 1, False)
    assert place.worker.run(again.id, again.epoch).outcome == "done"
    assert place.store.jobs.get(job_id).completed == 2

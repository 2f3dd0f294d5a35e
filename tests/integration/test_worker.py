"""The GPU worker over real stores and a real compute process: one outcome for each request."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nightjar.compute_config import ComputeConfig
from nightjar.gpu_worker.worker import answers, tasks
from nightjar.gpu_worker.worker.heartbeat import Heartbeat
from nightjar.gpu_worker.worker.launcher import Launcher
from nightjar.gpu_worker.worker.served import ServedModel
from nightjar.gpu_worker.worker.ticker import Ticker
from nightjar.gpu_worker.worker.worker import LEASE_LOST, GpuWorker
from nightjar.jobs.errors import StoreUnavailableError
from nightjar.jobs.records import (
    ClaimedRequest,
    EncodedRequest,
    JsonObject,
    MicroBatchRef,
    NewMicroBatch,
)
from nightjar.jobs.states import JobState, RequestKind
from nightjar.jobs.store import Store
from tests.jobs import planned, submit
from tests.outcomes import codes
from tests.processes import wait_until


@pytest.fixture(scope="module")
def launcher(tiny_model: Path) -> Iterator[Launcher]:
    started = Launcher(ComputeConfig(tiny_model, dtype="fp32", threads=1), on_failure=print)
    started.wait_ready()
    yield started
    started.close()


@pytest.fixture
def worker(store: Store, launcher: Launcher) -> GpuWorker:
    return GpuWorker(store, [ServedModel("tiny", "", launcher)], crashes_allowed=2)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def slow_batch(store: Store) -> tuple[str, MicroBatchRef]:
    """A micro-batch that computes for a while."""
    body: dict[str, object] = {
        "prompt": "a",
        "max_tokens": 120,
        "ignore_eos": True,
        "temperature": 0,
    }
    job_id = submit(store, [body] * 64)
    queued = [request.id for request in store.backlog.queued_requests(job_id, 64)]
    encoded = [EncodedRequest(id_, [[5, 6]]) for id_ in queued]
    (ref,) = store.planning.save_plan(
        job_id, encoded, [NewMicroBatch(RequestKind.GENERATE, 32, queued, 100)], []
    )
    return job_id, ref


def test_a_micro_batch_is_computed_once(store: Store, worker: GpuWorker) -> None:
    job_id, (ref,) = planned(store, 3, each=3)
    outcome = worker.run(ref.id, ref.epoch)
    assert (outcome.outcome, outcome.requests, outcome.failed) == ("done", 3, 0)
    assert worker.run(ref.id, ref.epoch).outcome == "skipped"
    assert store.jobs.get(job_id).state is JobState.COMPLETED
    texts = {r.body["choices"][0]["text"] for r in store.results.read(job_id) if r.body}
    assert len(texts) == 1
    assert len(store.results.read(job_id)) == 3


def test_a_stale_or_unknown_message_is_skipped(store: Store, worker: GpuWorker) -> None:
    _, (ref,) = planned(store, 1)
    assert worker.run(ref.id, 1).outcome == "skipped"
    assert worker.run(ref.id + 1000, 0).outcome == "skipped"


def test_threads_switch_often_while_a_single_call_waits(
    store: Store, worker: GpuWorker, usual_switching: float
) -> None:
    worker.run(999, 0)
    assert sys.getswitchinterval() == usual_switching
    worker.run(999, 0, live=True)
    assert sys.getswitchinterval() < usual_switching


@pytest.fixture
def usual_switching() -> Iterator[float]:
    """The interval in which threads are switched; it comes back afterwards."""
    usual_s = sys.getswitchinterval()
    yield usual_s
    sys.setswitchinterval(usual_s)


def test_a_message_that_does_not_say_live_is_a_jobs_and_makes_room(
    store: Store, worker: GpuWorker, monkeypatch: pytest.MonkeyPatch, usual_switching: float
) -> None:
    """The planner hears of each end, except of single calls: these take no room."""
    ticks = threading.Semaphore(0)
    heartbeat, ticker = Heartbeat(worker, 60), Ticker(ticks.release, every_s=0.01)
    parts = tasks.WorkerParts(store, [], worker, heartbeat, ticker)
    monkeypatch.setattr(tasks, "opened", [parts])
    try:
        assert tasks.compute(999, 0, live=True)["outcome"] == "skipped"
        assert not ticks.acquire(timeout=0.1)
        assert tasks.compute(999, 0)["outcome"] == "skipped"
        assert ticks.acquire(timeout=10)
    finally:
        heartbeat.stop()
        ticker.close()


def test_work_under_a_lost_lease_is_thrown_away(
    store: Store, worker: GpuWorker, thread: ThreadPoolExecutor
) -> None:
    job_id, ref = slow_batch(store)
    running = thread.submit(worker.run, ref.id, 0)
    wait_until("the claim", store.heartbeats.of_lease_holders)
    assert store.leases.give_back_all(worker.owner) == 1
    assert running.result().outcome.startswith("thrown away")
    assert store.results.read(job_id) == []
    assert worker.run(ref.id, 1).outcome == "done"
    assert len(store.results.read(job_id)) == 64


def test_after_a_crash_its_requests_are_computed_alone_and_answered_alike(
    store: Store, worker: GpuWorker, launcher: Launcher, thread: ThreadPoolExecutor
) -> None:
    job_id, ref = slow_batch(store)
    launcher.wait_ready()
    running = thread.submit(worker.run, ref.id, 0)
    wait_until("the claim", store.heartbeats.of_lease_holders)
    os.kill(launcher.pid, signal.SIGKILL)
    assert running.result().outcome == "crashed: compute process lost"
    halves = store.planning.dispatchable(9)
    assert {half.isolated for half in halves} == {True}
    for half in halves:
        assert worker.run(half.id, half.epoch, alone=True).outcome == "done"
    assert store.jobs.get(job_id).state is JobState.COMPLETED
    texts = {r.body["choices"][0]["text"] for r in store.results.read(job_id) if r.body}
    assert len(texts) == 1


def test_a_crash_after_a_lost_lease_changes_nothing(
    store: Store, worker: GpuWorker, launcher: Launcher, thread: ThreadPoolExecutor
) -> None:
    job_id, ref = slow_batch(store)
    launcher.wait_ready()
    running = thread.submit(worker.run, ref.id, 0)
    wait_until("the claim", store.heartbeats.of_lease_holders)
    store.leases.give_back_all(worker.owner)
    os.kill(launcher.pid, signal.SIGKILL)
    assert running.result().outcome.startswith("thrown away")
    assert store.results.read(job_id) == []
    assert [(again.id, again.isolated) for again in store.planning.dispatchable(9)] == [
        (ref.id, False)
    ]


def test_a_cancelled_job_leaves_the_engine(
    store: Store, worker: GpuWorker, thread: ThreadPoolExecutor
) -> None:
    job_id, ref = slow_batch(store)
    running = thread.submit(worker.run, ref.id, 0)
    wait_until("the claim", store.heartbeats.of_lease_holders)
    store.stopping.cancel(job_id)
    assert running.result().outcome == "done"
    assert store.jobs.get(job_id).state is JobState.CANCELLED
    assert len(store.results.read(job_id)) == 64


@pytest.mark.parametrize("where", ["make_message", "make_result"])
def test_a_request_that_raises_in_the_worker_fails_alone(
    store: Store, worker: GpuWorker, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    job_id, (ref,) = planned(store, 3, each=3)
    works = getattr(answers, where)

    def raises_for_one(request: ClaimedRequest, *rest: Any, **named: Any) -> Any:
        if request.index == 1:
            raise KeyError("top_k")
        return works(request, *rest, **named)

    monkeypatch.setattr(f"nightjar.gpu_worker.worker.computing.{where}", raises_for_one)
    outcome = worker.run(ref.id, 0)
    assert (outcome.outcome, outcome.requests, outcome.failed) == ("done", 3, 1)
    assert codes(store.results.read(job_id)) == [None, "internal_error", None]


def test_a_fault_of_ours_ends_the_requests_and_is_raised(
    store: Store, worker: GpuWorker, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, (ref,) = planned(store, 2, each=2)
    monkeypatch.setattr(launcher, "submit", raiser(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        worker.run(ref.id, 0)
    assert {r.error.code for r in store.results.read(job_id) if r.error} == {"internal_error"}
    assert store.jobs.get(job_id).state is JobState.FAILED


def test_a_lease_that_an_error_left_behind_goes_back(
    store: Store, worker: GpuWorker, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, (ref,) = planned(store, 2, each=2)
    away = StoreUnavailableError("the database went away")
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "submit", raiser(away))
        with pytest.raises(StoreUnavailableError):
            worker.run(ref.id, 0)
    assert store.leases.held_by(worker.owner) != []
    worker.give_back_leaked()
    assert store.leases.held_by(worker.owner) == []
    assert worker.run(ref.id, 1).outcome == "done"
    assert store.jobs.get(job_id).state is JobState.COMPLETED


def test_a_lease_in_work_is_not_given_back(
    store: Store, worker: GpuWorker, thread: ThreadPoolExecutor
) -> None:
    _, ref = slow_batch(store)
    running = thread.submit(worker.run, ref.id, 0)
    wait_until("the claim", store.heartbeats.of_lease_holders)
    assert worker.run(ref.id, 0).outcome == "skipped"
    worker.give_back_leaked()
    assert running.result().outcome == "done"


def test_a_worker_that_leaves_gives_back_its_leases_and_writes_its_last_seconds(
    store: Store, tiny_model: Path
) -> None:
    config = ComputeConfig(tiny_model, dtype="fp32", threads=1)
    launcher = Launcher(config, on_failure=print)
    worker = GpuWorker(store, [ServedModel("tiny", "", launcher)], crashes_allowed=2)
    try:
        launcher.wait_ready()
        worker.beat()
        at_start = store.heartbeats.compute_seconds()
        _, (ref, left) = planned(store, 2)
        worker.run(ref.id, ref.epoch)
        assert store.leases.claim(left.id, left.epoch, worker.owner) is not None
    finally:
        launcher.close()
    worker.leave()
    assert at_start.engine_s == 0
    assert at_start.load_s > 0
    assert store.heartbeats.compute_seconds() == launcher.totals.seconds
    assert launcher.totals.seconds.engine_s > 0
    assert [again.id for again in store.planning.dispatchable(9)] == [left.id]


@pytest.mark.parametrize("alone", [True, False])
def test_a_draining_worker_leaves_what_it_has_not_begun_to_others(
    store: Store, worker: GpuWorker, alone: bool
) -> None:
    _, (ref, other) = planned(store, 2)
    store.planning.mark_dispatched([ref, other])
    worker.drain(grace_s=0)
    outcome = worker.run(ref.id, ref.epoch, alone=alone)
    assert outcome.outcome == "not begun: the worker ends"
    assert [(again.id, again.epoch) for again in store.planning.dispatchable(9)] == [(ref.id, 0)]
    assert [waiting.id for waiting in store.planning.dispatched()] == [other.id]


def test_a_draining_worker_gives_back_what_takes_too_long(
    store: Store, worker: GpuWorker, launcher: Launcher, thread: ThreadPoolExecutor
) -> None:
    job_id, ref = slow_batch(store)
    running = thread.submit(worker.run, ref.id, 0)
    wait_until("the claim", store.heartbeats.of_lease_holders)
    wait_until("the computing", lambda: launcher.in_flight)
    worker.drain(grace_s=0)
    assert running.result().outcome == "given back: not computed here"
    assert store.results.read(job_id) == []
    (again,) = store.planning.dispatchable(9)
    assert (again.id, again.epoch, again.isolated) == (ref.id, 1, False)


def test_a_drained_worker_gives_up_results_that_no_database_takes(
    store: Store,
    worker: GpuWorker,
    thread: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It would wait on, past its grace period, until it is killed."""
    job_id, (ref,) = planned(store, 2, each=2)
    with monkeypatch.context() as patch:
        patch.setattr(store.leases, "finish", raiser(StoreUnavailableError("the disk is full")))
        running = thread.submit(worker.run, ref.id, 0)
        wait_until("the landing to wait", lambda: "wait for the database" in caplog.text)
        assert not running.done()
        worker.drain(grace_s=0)
        with pytest.raises(StoreUnavailableError):
            running.result(timeout=30)
    assert store.results.read(job_id) == []
    worker.leave()
    (again,) = store.planning.dispatchable(9)
    assert (again.id, again.epoch) == (ref.id, 1)


def test_a_draining_worker_finishes_what_it_has_begun(
    store: Store, worker: GpuWorker, thread: ThreadPoolExecutor
) -> None:
    job_id, ref = slow_batch(store)
    running = thread.submit(worker.run, ref.id, 0)
    wait_until("the claim", store.heartbeats.of_lease_holders)
    worker.stop_claiming()
    assert running.result().outcome == "done"
    assert store.jobs.get(job_id).state is JobState.COMPLETED


def test_the_heartbeat_writes_the_seconds_of_the_launcher(
    store: Store, worker: GpuWorker, launcher: Launcher
) -> None:
    _, (ref,) = planned(store, 1)
    worker.run(ref.id, ref.epoch)
    heartbeat = Heartbeat(worker, every_s=0.05)
    try:
        wait_until("a beat", lambda: store.heartbeats.compute_seconds() == launcher.totals.seconds)
    finally:
        heartbeat.stop()
    assert launcher.totals.seconds.engine_s > 0


def test_the_heartbeat_says_what_the_worker_does(
    store: Store, worker: GpuWorker, launcher: Launcher, thread: ThreadPoolExecutor
) -> None:
    job_id, ref = slow_batch(store)
    worker.beat()
    before = told(store)["models"][0]["decode_tokens"]
    running = thread.submit(worker.run, ref.id, 0)
    wait_until("the computing", lambda: launcher.in_flight)
    worker.beat()
    (status,) = store.heartbeats.statuses()
    assert status.owner == worker.owner
    (batch,) = status.status["micro_batches"]
    assert (batch["id"], batch["job_id"], batch["kind"]) == (ref.id, job_id, "generate")
    assert batch["requests"] == 64
    (model,) = status.status["models"]
    assert (model["device"], model["precision"]) == ("cpu", "fp32")
    assert model["requests"] > 0
    running.result()

    def is_told() -> bool:
        worker.beat()
        model = told(store)["models"][0]
        counted = launcher.totals.statistics.counters.decode_tokens
        assert model["decode_tokens"] <= counted
        return bool(model["decode_tokens"] > before and not model["running"])

    wait_until("the last steps to be told", is_told)
    done = told(store)
    assert (done["micro_batch_count"], done["micro_batches"]) == (0, [])
    (model,) = done["models"]
    assert (model["running"], model["waiting"], model["kv_held"]) == (0, 0, 0)
    assert model["kv_blocks"] > 0
    assert model["slots"] > 0


def told(store: Store) -> JsonObject:
    (status,) = store.heartbeats.statuses()
    return status.status


def test_results_that_do_not_land_while_heartbeats_do_lose_their_lease(
    store: Store,
    launcher: Launcher,
    thread: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = GpuWorker(
        store, [ServedModel("tiny", "", launcher)], crashes_allowed=2, hung_after_beats=3
    )
    _, (ref,) = planned(store, 1)
    finish, asked, let_go = store.leases.finish, threading.Event(), threading.Event()

    def hang(*arguments: Any, **options: Any) -> bool:
        asked.set()
        let_go.wait()
        return finish(*arguments, **options)

    monkeypatch.setattr(store.leases, "finish", hang)
    running = thread.submit(worker.run, ref.id, ref.epoch)
    try:
        assert asked.wait(60)
        for _ in range(3):
            worker.keep_alive()
            assert [held.id for held in store.leases.held_by(worker.owner)] == [ref.id]
        worker.keep_alive()
        assert store.leases.held_by(worker.owner) == []
        assert [found.epoch for found in store.planning.dispatchable(9)] == [ref.epoch + 1]
    finally:
        let_go.set()
    assert running.result().outcome == LEASE_LOST


def test_a_worker_that_cannot_give_back_what_hangs_is_silent(
    store: Store,
    launcher: Launcher,
    thread: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = GpuWorker(
        store, [ServedModel("tiny", "", launcher)], crashes_allowed=2, hung_after_beats=1
    )
    _, (ref,) = planned(store, 1)
    finish, asked, let_go = store.leases.finish, threading.Event(), threading.Event()

    def hang(*arguments: Any, **options: Any) -> bool:
        asked.set()
        let_go.wait()
        return finish(*arguments, **options)

    monkeypatch.setattr(store.leases, "finish", hang)
    running = thread.submit(worker.run, ref.id, ref.epoch)
    try:
        assert asked.wait(60)
        worker.keep_alive()
        beats = store.heartbeats.of_lease_holders()
        with monkeypatch.context() as locked:
            locked.setattr(
                store.leases, "give_back", raiser(StoreUnavailableError("the row is locked"))
            )
            with pytest.raises(StoreUnavailableError):
                worker.keep_alive()
        assert store.heartbeats.of_lease_holders() == beats
    finally:
        let_go.set()
    assert running.result().outcome == "done"


def raiser(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail

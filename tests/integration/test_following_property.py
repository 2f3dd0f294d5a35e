"""Merged or not, a job of duplicates ends alike: hypothesis draws the job and its troubles."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nightjar.jobs.records import (
    ClaimedRequest,
    EncodedRequest,
    NewMicroBatch,
    NewResult,
    ResultRecord,
)
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.workers import Crash
from tests.jobs import Body, submit

CRASH = Crash("the compute process was ended by SIGSEGV", allowed=2)
# Events of the life of a job, in between its leases; "step" computes a micro-batch.
EVENTS = st.sampled_from(["step", "step", "step", "give back", "retry", "requeue"])
PROMPTS = st.sampled_from(["good", "better", "refused", "failing", "poison"])
BODIES = st.builds(
    lambda prompt, drawn: (
        {"prompt": prompt, "temperature": 1 if drawn else 0, "seed": 7 if drawn == 1 else None}
    ),
    PROMPTS,
    st.integers(0, 2),
)


def outcome(request: ClaimedRequest) -> NewResult:
    """What the engine makes of a request: a function of what it is asked."""
    prompt = request.body["prompt"]
    if prompt == "failing":
        return NewResult.failure(request.id, "internal_error", "it fails", status=500)
    draws = request.body["temperature"] > 0
    seed = request.body["seed"] or request.custom_id if draws else None
    answer = {"id": f"cmpl-{request.id}", "text": f"{prompt} by {seed}"}
    return NewResult(request.id, 200, answer, None, 3, len(prompt), 16, 16 - len(prompt), "stop")


class Run:
    """One job in a store, computed by a lone worker."""

    def __init__(self, store: Store, bodies: list[Body], each: int, *, merge_equal: bool) -> None:
        self.store, self.each = store, each
        self.job_id = submit(store, bodies, merge_equal=merge_equal)
        self.computed = 0

    def plan(self) -> None:
        queued = self.store.backlog.queued_requests(self.job_id, 1_000)
        refused = [item.id for item in queued if item.body["prompt"] == "refused"]
        ids = [item.id for item in queued if item.id not in refused]
        groups = [ids[start : start + self.each] for start in range(0, len(ids), self.each)]
        error = NewResult.failure(0, "too_long", "too long").error
        assert error is not None
        self.store.planning.save_plan(
            self.job_id,
            [EncodedRequest(id_, [[1, 2, 3]]) for id_ in ids],
            [NewMicroBatch(RequestKind.GENERATE, 32, group, 7) for group in groups],
            [(id_, error) for id_ in refused],
        )

    def step(self, event: str) -> bool:
        """Whether there was anything to do."""
        self.plan()
        if event == "retry":
            return self.store.jobs.get(self.job_id).failed > 0 and bool(
                self.store.retries.retry(self.job_id)
            )
        refs = self.store.planning.dispatchable(1_000)
        if event == "requeue":
            self.store.planning.mark_dispatched(refs)
            self.store.planning.requeue(self.store.planning.dispatched())
        claimed = self.store.leases.claim(refs[0].id, refs[0].epoch, "worker") if refs else None
        if claimed is None:
            return False
        lease = (claimed.id, claimed.epoch, "worker")
        if event == "give back":
            return self.store.leases.give_back(*lease)
        if any(request.body["prompt"] == "poison" for request in claimed.requests):
            return self.store.suspects.add(*lease, CRASH)
        self.computed += len(claimed.requests)
        return self.store.leases.finish(*lease, [outcome(request) for request in claimed.requests])

    def live(self, events: list[str]) -> None:
        for event in events:
            self.step(event)
        while self.step("step"):
            pass

    def told(self) -> list[tuple[object, ...]]:
        return [_told(record) for record in self.store.results.read(self.job_id)]


def _told(record: ResultRecord) -> tuple[object, ...]:
    """What an outcome says, without its request's id and origin."""
    text = None if record.body is None else record.body["text"]
    tokens = (record.prompt_tokens, record.completion_tokens, record.saved_tokens)
    return (record.custom_id, record.index, record.status_code, text, record.error, tokens)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(BODIES, min_size=1, max_size=12), st.integers(1, 4), st.lists(EVENTS, max_size=12))
def test_merged_or_not_a_job_ends_alike(
    migrated_sqlite_file: Path, bodies: list[Body], each: int, events: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = shutil.copy(migrated_sqlite_file, folder)
        store = Store(f"sqlite:///{path}", synchronous="normal")
        try:
            runs = [Run(store, bodies, each, merge_equal=merge) for merge in (True, False)]
            for run in runs:
                # The other job waits: micro-batches are given out job by job.
                run.live(events)
            merged, plain = runs
            assert merged.told() == plain.told()
            jobs = [store.jobs.get(run.job_id) for run in runs]
            assert jobs[0].ended == jobs[0].total == len(bodies)
            alike = ("state", "completed", "failed", "completion_tokens", "saved_tokens")
            assert [getattr(jobs[0], name) for name in alike] == [
                getattr(jobs[1], name) for name in alike
            ]
            assert jobs[1].reused == 0
            if "retry" not in events:  # what has failed by then depends on the order
                assert merged.computed <= plain.computed
            _agrees_with_its_bodies(store, merged.job_id, jobs[0].reused)
        finally:
            store.close()


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(BODIES, min_size=1, max_size=12), st.integers(1, 4), st.lists(EVENTS, max_size=8))
def test_a_cancel_at_any_time_ends_each_row_once(
    migrated_sqlite_file: Path, bodies: list[Body], each: int, events: list[str]
) -> None:
    """What has an answer has the one of the undisturbed job."""
    with tempfile.TemporaryDirectory() as folder:
        path = shutil.copy(migrated_sqlite_file, folder)
        store = Store(f"sqlite:///{path}", synchronous="normal")
        try:
            plain = Run(store, bodies, each, merge_equal=False)
            plain.live([])
            run = Run(store, bodies, each, merge_equal=True)
            for event in events:
                run.step(event)
            leased = [
                store.leases.claim(ref.id, ref.epoch, "late")
                for ref in store.planning.dispatchable(1)
            ]
            store.stopping.cancel(run.job_id)
            for batch in filter(None, leased):
                results = [outcome(request) for request in batch.requests]
                assert store.leases.finish(batch.id, batch.epoch, "late", results)
            assert store.jobs.get(run.job_id).is_over
            undisturbed = {entry[0]: entry for entry in plain.told()}
            told = run.told()
            assert [entry[1] for entry in told] == list(range(len(bodies)))
            for entry in told:
                # "late" answers poison, too: the engine survived it this time.
                if entry[2] == 200 and "poison" not in str(entry[3]):
                    assert entry == undisturbed[entry[0]]
        finally:
            store.close()


def _agrees_with_its_bodies(store: Store, job_id: str, reused: int) -> None:
    bodies = [record.body for record in store.results.read(job_id) if record.body is not None]
    assert sum("reused" in body for body in bodies) == reused
    assert len({body["id"] for body in bodies}) == len(bodies)

"""Tenants with planned work in a real store, and workers that compute it by name only."""

from collections import Counter, deque
from dataclasses import dataclass

import sqlalchemy as sa

from nightjar.jobs.records import (
    ClaimedMicroBatch,
    EncodedRequest,
    MicroBatchRef,
    NewJob,
    NewMicroBatch,
    NewRequest,
    NewResult,
)
from nightjar.jobs.states import RequestKind
from nightjar.jobs.store import Store
from nightjar.jobs.store.account_tables import tenant as tenants
from nightjar.jobs.store.common import now


@dataclass(frozen=True)
class Rows:
    """What each row of a tenant costs."""

    prompt: int = 10
    generated: int = 10
    allowed: int = 10  # its max_tokens, by which the plan estimates it
    each: int = 1  # rows in a micro-batch

    @property
    def tokens(self) -> int:
        """Computed tokens of one micro-batch."""
        return self.each * (self.prompt + self.generated)


def set_weight(store: Store, name: str, weight: float) -> None:
    row = {"name": name, "weight": weight, "created_at": now()}
    store.database.write(lambda connection: connection.execute(sa.insert(tenants).values(row)))


def submit_for(store: Store, name: str, rows: int, *, priority: int = 0) -> str:
    body: dict[str, object] = {"prompt": "a", "max_tokens": 1}
    accepted = [
        NewRequest(n, n + 1, f"row-{n}", RequestKind.GENERATE, dict(body)) for n in range(rows)
    ]
    new = NewJob("tiny", merge_equal=False, tenant=name, priority=priority)
    with store.jobs.submit(new) as submission:
        submission.add(accepted)
    return submission.job_id


def plan_for(
    store: Store,
    name: str,
    micro_batches: int,
    rows: Rows = Rows(),
    *,
    priority: int = 0,
    fingerprint: str = "",
) -> list[MicroBatchRef]:
    """A job of the tenant, planned."""
    job_id = submit_for(store, name, micro_batches * rows.each, priority=priority)
    ids = [item.id for item in store.backlog.queued_requests(job_id, micro_batches * rows.each)]
    groups = [ids[start : start + rows.each] for start in range(0, len(ids), rows.each)]
    estimate = rows.prompt + rows.allowed
    return store.planning.save_plan(
        job_id,
        [EncodedRequest(id_, [[1]]) for id_ in ids],
        [NewMicroBatch(RequestKind.GENERATE, 32, own, estimate * len(own)) for own in groups],
        fingerprint=fingerprint,
    )


class Machine:
    """A dispatcher, a queue in order, and a few leases at a time.

    landed: The computed tokens of each tenant.
    """

    def __init__(self, store: Store, *, window: int = 8, leases: int = 4) -> None:
        self.store = store
        self.landed: Counter[str] = Counter()
        self._window = window
        self._leases = leases
        self._queue: deque[MicroBatchRef] = deque()
        self._held: deque[ClaimedMicroBatch] = deque()
        self._of_jobs: dict[str, tuple[str, Rows]] = {}

    def add(self, name: str, micro_batches: int, rows: Rows = Rows()) -> None:
        """Give the tenant a job of so many micro-batches."""
        refs = plan_for(self.store, name, micro_batches, rows)
        self._of_jobs[refs[0].job_id] = (name, rows)

    def run(self, micro_batches: int, *, settles_every: int = 2) -> Counter[str]:
        """Compute so many micro-batches, or what there is; returns the tokens that landed."""
        before = Counter(self.landed)
        for turn in range(micro_batches):
            if turn % settles_every == 0:
                self.store.shares.settle()
            self._dispatch()
            if not self._held:
                break
            self._finish(self._held.popleft())
        return self.landed - before

    def _dispatch(self) -> None:
        found = self.store.planning.dispatchable(self._window)
        self.store.planning.mark_dispatched(found)
        self._queue += found
        while self._queue and len(self._held) < self._leases:
            ref = self._queue.popleft()
            claimed = self.store.leases.claim(ref.id, ref.epoch, "worker", ref.fingerprint)
            assert claimed is not None
            self._held.append(claimed)

    def _finish(self, claimed: ClaimedMicroBatch) -> None:
        name, rows = self._of_jobs[claimed.job_id]
        results = [
            NewResult(
                item.id,
                200,
                {"text": ""},
                prompt_tokens=rows.prompt,
                completion_tokens=rows.generated,
            )
            for item in claimed.requests
        ]
        assert self.store.leases.finish(claimed.id, claimed.epoch, "worker", results)
        self.landed[name] += rows.tokens

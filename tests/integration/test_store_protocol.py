"""The lease protocol as a state machine: hypothesis looks for an order of events that breaks it.

The model knows who may finish what: the newest lease of a micro-batch that was
not taken back. Everything else must be thrown away, and at the end each request
has exactly one outcome.
"""

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nightjar.jobs.records import (
    ClaimedMicroBatch,
    JobState,
    MicroBatchRef,
    NewResult,
    RequestError,
)
from nightjar.jobs.store import Store
from tests.jobs import planned
from tests.outcomes import answers

BATCHES, EACH = 2, 2
OWNERS = st.sampled_from(["ann", "bob"])


class LeaseProtocol(RuleBasedStateMachine):
    """Messages may be kept and delivered at any later time; so may results."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "jobs.db"
        self.store = Store(f"sqlite:///{path}", synchronous="normal")
        self.store.migrate()
        self.messages: list[MicroBatchRef] = []
        self.claims: list[tuple[str, ClaimedMicroBatch]] = []
        self.leases: dict[int, tuple[str, ClaimedMicroBatch]] = {}  # by micro-batch
        self.ended: set[int] = set()
        self.cancelled = False

    @initialize()
    def submit(self) -> None:
        self.job_id, self.messages = planned(self.store, BATCHES * EACH, each=EACH)

    def teardown(self) -> None:
        try:
            self._finish_everything()
        finally:
            self.store.close()
            self.folder.cleanup()

    @rule(data=st.data(), owner=OWNERS)
    def deliver(self, data: st.DataObject, owner: str) -> None:
        """A message arrives: new, old or for the second time."""
        ref = data.draw(st.sampled_from(self.messages))
        claimed = self.store.claim(ref.id, ref.epoch, owner)
        if claimed is None:
            return
        assert not self.cancelled
        assert ref.id not in self.leases
        assert ref.id not in self.ended
        assert len(claimed.requests) == EACH
        self.leases[ref.id] = (owner, claimed)
        self.claims.append((owner, claimed))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), fails=st.booleans())
    def finish(self, data: st.DataObject, fails: bool) -> None:
        owner, claimed = data.draw(st.sampled_from(list(self.leases.values())))
        if fails:
            error = RequestError("compute_failed", "it failed")
            assert self.store.fail_micro_batch(claimed.id, claimed.epoch, owner, error)
        else:
            assert self.store.finish(claimed.id, claimed.epoch, owner, answers(claimed))
        del self.leases[claimed.id]
        self.ended.add(claimed.id)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), crashed=st.booleans())
    def give_back(self, data: st.DataObject, crashed: bool) -> None:
        owner, claimed = data.draw(st.sampled_from(list(self.leases.values())))
        assert self.store.give_back(claimed.id, claimed.epoch, owner, crashed=crashed)
        self._take_back(claimed.id)

    @precondition(lambda self: self._lost())
    @rule(data=st.data())
    def act_on_a_lost_lease(self, data: st.DataObject) -> None:
        """A worker that was thought dead comes back, or a result arrives for the second time."""
        owner, claimed = data.draw(st.sampled_from(self._lost()))
        error = RequestError("compute_failed", "it failed")
        assert not self.store.finish(claimed.id, claimed.epoch, owner, answers(claimed))
        assert not self.store.fail_micro_batch(claimed.id, claimed.epoch, owner, error)
        assert not self.store.give_back(claimed.id, claimed.epoch, owner)

    @rule(owner=OWNERS)
    def declare_dead(self, owner: str) -> None:
        held = [id_ for id_, (holder, _) in self.leases.items() if holder == owner]
        assert self.store.release_owner(owner) == len(held)
        for id_ in held:
            self._take_back(id_)

    @rule()
    def dispatch(self) -> None:
        self.store.mark_dispatched(self.store.dispatchable(BATCHES + 1))

    @rule()
    def publish_again(self) -> None:
        self.store.requeue(self.store.dispatched())

    @precondition(lambda self: len(self.claims) > BATCHES)
    @rule()
    def cancel(self) -> None:
        if len(self.ended) < BATCHES:
            self.cancelled = True
        self.store.cancel(self.job_id)
        for ref in self.messages:
            if self.cancelled and ref.id not in self.leases:
                self.ended.add(ref.id)

    @invariant()
    def the_job_agrees_with_its_results(self) -> None:
        if not self.messages:
            return
        job = self.store.job(self.job_id)
        results = self.store.results(self.job_id)
        assert job.ended == len(results) == len({item.id for item in results})
        assert len(results) == EACH * len(self.ended)
        assert job.is_over == (len(self.ended) == BATCHES)

    def _lost(self) -> list[tuple[str, ClaimedMicroBatch]]:
        held = [id(claimed) for _, claimed in self.leases.values()]
        return [claim for claim in self.claims if id(claim[1]) not in held]

    def _take_back(self, id_: int) -> None:
        del self.leases[id_]
        if self.cancelled:
            self.ended.add(id_)
        # The newest message first: hypothesis tries the first of a list most often.
        fresh = [ref for ref in self.store.dispatchable(BATCHES) if ref.id == id_]
        self.messages = fresh + self.messages

    def _finish_everything(self) -> None:
        """Whatever happened, a lone worker can bring the job to its end."""
        if not self.messages:
            return
        for owner in ("ann", "bob"):
            self.store.release_owner(owner)
        for ref in self.store.dispatchable(BATCHES) + self.store.dispatched():
            claimed = self.store.claim(ref.id, ref.epoch, "last")
            assert claimed is not None
            results: list[NewResult] = answers(claimed)
            assert self.store.finish(ref.id, ref.epoch, "last", results)
        job = self.store.job(self.job_id)
        assert job.ended == job.total == BATCHES * EACH
        assert (job.state is JobState.CANCELLED) == self.cancelled


LeaseProtocol.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLeaseProtocol = LeaseProtocol.TestCase

"""The lease protocol as a state machine: hypothesis looks for an order of events that breaks it.

The model knows who may finish what: the newest lease of a micro-batch that was
not taken back. Everything else must be thrown away. It knows too what a crash
makes of a micro-batch: halves to be computed alone, and the end of a request
that crashed alone once too often. At the end each request has exactly one outcome.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nightjar.jobs.records import ClaimedMicroBatch, MicroBatchRef, NewResult, RequestError
from nightjar.jobs.states import JobState
from nightjar.jobs.store import Store
from nightjar.jobs.workers import Crash
from tests.jobs import planned
from tests.outcomes import answers
from tests.postgres_schemas import Schemas

BATCHES, EACH = 2, 3
MANY = 100
CRASH = Crash("the compute process was ended by SIGSEGV", allowed=2)
OWNERS = st.sampled_from(["ann", "bob"])


@cache
def migrated() -> tempfile.TemporaryDirectory[str]:
    """A folder with a database that has tables: made once, and copied for each example."""
    folder = tempfile.TemporaryDirectory()
    store = Store(f"sqlite:///{folder.name}/jobs.db", synchronous="normal")
    store.migrate()
    store.close()
    return folder


class LeaseProtocol(RuleBasedStateMachine):
    """Messages may be kept and delivered at any later time; so may results."""

    def __init__(self) -> None:
        super().__init__()
        self.place = ExitStack()
        self.store = self.open_store()
        self.messages: list[MicroBatchRef] = []
        self.claims: list[tuple[str, ClaimedMicroBatch]] = []
        self.leases: dict[int, tuple[str, ClaimedMicroBatch]] = {}  # by micro-batch
        self.ended: set[int] = set()  # micro-batches
        self.outcomes = 0
        self.cancelled = False

    def open_store(self) -> Store:
        """A store with tables and no jobs; `place` takes its database away."""
        folder = self.place.enter_context(tempfile.TemporaryDirectory())
        path = Path(folder) / "jobs.db"
        shutil.copy(Path(migrated().name) / "jobs.db", path)
        return Store(f"sqlite:///{path}", synchronous="normal")

    @initialize()
    def submit(self) -> None:
        self.job_id, self.messages = planned(self.store, BATCHES * EACH, each=EACH)

    def teardown(self) -> None:
        try:
            self._finish_everything()
        finally:
            self.store.close()
            self.place.close()

    @rule(data=st.data(), owner=OWNERS)
    def deliver(self, data: st.DataObject, owner: str) -> None:
        """A message arrives: new, old or for the second time."""
        ref = data.draw(st.sampled_from(self.messages))
        claimed = self.store.leases.claim(ref.id, ref.epoch, owner)
        if claimed is None:
            return
        assert not self.cancelled
        assert ref.id not in self.leases
        assert ref.id not in self.ended
        assert len(claimed.requests) == ref.size
        assert claimed.isolated == ref.isolated
        self.leases[ref.id] = (owner, claimed)
        self.claims.append((owner, claimed))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), fails=st.booleans())
    def finish(self, data: st.DataObject, fails: bool) -> None:
        owner, claimed = data.draw(st.sampled_from(list(self.leases.values())))
        if fails:
            error = RequestError("compute_failed", "it failed")
            assert self.store.leases.fail(claimed.id, claimed.epoch, owner, error)
        else:
            assert self.store.leases.finish(claimed.id, claimed.epoch, owner, answers(claimed))
        self._end(claimed)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        owner, claimed = data.draw(st.sampled_from(list(self.leases.values())))
        assert self.store.leases.give_back(claimed.id, claimed.epoch, owner)
        self._take_back(claimed)

    @precondition(lambda self: self.leases and not self.cancelled)
    @rule(data=st.data())
    def give_back_and_claim_again(self, data: st.DataObject) -> None:
        """The same owner holds it under two epochs, one after the other."""
        owner, claimed = data.draw(st.sampled_from(list(self.leases.values())))
        assert self.store.leases.give_back(claimed.id, claimed.epoch, owner)
        self._take_back(claimed)
        again = self.store.leases.claim(claimed.id, claimed.epoch + 1, owner)
        assert again is not None
        self.leases[claimed.id] = (owner, again)
        self.claims.append((owner, again))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def lose_the_compute_process(self, data: st.DataObject) -> None:
        owner, claimed = data.draw(st.sampled_from(list(self.leases.values())))
        count = data.draw(st.integers(0, claimed.size))
        answered = answers(claimed)[:count]
        assert self.store.suspects.add(claimed.id, claimed.epoch, owner, CRASH, answered)
        self._suspect([claimed], answered=count)

    @precondition(lambda self: self._lost())
    @rule(data=st.data())
    def act_on_a_lost_lease(self, data: st.DataObject) -> None:
        """A worker that was thought dead comes back, or a result arrives for the second time."""
        owner, claimed = data.draw(st.sampled_from(self._lost()))
        error = RequestError("compute_failed", "it failed")
        assert not self.store.leases.finish(claimed.id, claimed.epoch, owner, answers(claimed))
        assert not self.store.leases.fail(claimed.id, claimed.epoch, owner, error)
        assert not self.store.leases.give_back(claimed.id, claimed.epoch, owner)
        assert not self.store.suspects.add(
            claimed.id, claimed.epoch, owner, CRASH, answers(claimed)
        )

    @rule(owner=OWNERS, leaves=st.booleans())
    def end_the_worker(self, owner: str, leaves: bool) -> None:
        """It leaves in order, or is declared dead."""
        held = [claimed for holder, claimed in self.leases.values() if holder == owner]
        if leaves:
            assert self.store.leases.give_back_all(owner) == len(held)
        else:
            assert self.store.suspects.add_owner(owner, CRASH) == len(held)
        if not leaves:
            self._suspect(held, answered=0)
            return
        for claimed in held:
            self._take_back(claimed)

    @rule()
    def dispatch(self) -> None:
        self.store.planning.mark_dispatched(self.store.planning.dispatchable(MANY))

    @rule()
    def publish_again(self) -> None:
        self.store.planning.requeue(self.store.planning.dispatched())

    @precondition(lambda self: len(self.claims) > BATCHES)
    @rule()
    def cancel(self) -> None:
        if self.outcomes < BATCHES * EACH:
            self.cancelled = True
        self.store.stopping.cancel(self.job_id)
        for ref in self.messages:
            if self.cancelled and ref.id not in self.leases:
                self._end(ref)

    @invariant()
    def the_job_agrees_with_its_results(self) -> None:
        if not self.messages:
            return
        job = self.store.jobs.get(self.job_id)
        results = self.store.results.read(self.job_id)
        assert job.ended == len(results) == len({item.id for item in results})
        assert len(results) == self.outcomes
        assert job.is_over == (self.outcomes == BATCHES * EACH)

    def _lost(self) -> list[tuple[str, ClaimedMicroBatch]]:
        held = [id(claimed) for _, claimed in self.leases.values()]
        return [claim for claim in self.claims if id(claim[1]) not in held]

    def _end(self, batch: ClaimedMicroBatch | MicroBatchRef) -> None:
        """The requests of a micro-batch have their outcomes."""
        self.leases.pop(batch.id, None)
        if batch.id not in self.ended:
            self.ended.add(batch.id)
            self.outcomes += batch.size

    def _take_back(self, claimed: ClaimedMicroBatch) -> None:
        if self.cancelled:
            self._end(claimed)
            return
        del self.leases[claimed.id]
        self._read_messages()

    def _suspect(self, crashed: Sequence[ClaimedMicroBatch], *, answered: int) -> None:
        """What a crash makes of the micro-batches that were held; `answered` of each had ended."""
        halves: Counter[int] = Counter()  # by how many requests they hold
        for claimed in crashed:
            lone = claimed.isolated and claimed.size == 1
            dies = lone and claimed.crashes + 1 == CRASH.allowed
            if self.cancelled or dies or answered == claimed.size:
                self._end(claimed)
                continue
            del self.leases[claimed.id]
            if not lone:
                self.ended.add(claimed.id)
                self.outcomes += answered
                rest = claimed.size - answered
                halves.update(size for size in ((rest + 1) // 2, rest // 2) if size)
        known = {ref.id for ref in self.messages}
        self._read_messages()
        new = [ref for ref in self.messages if ref.id not in known]
        assert all(half.isolated for half in new)
        assert Counter(half.size for half in new) == halves

    def _read_messages(self) -> None:
        """The newest messages first: hypothesis tries the first of a list most often."""
        fresh = [ref for ref in self.store.planning.dispatchable(MANY) if ref not in self.messages]
        self.messages = fresh + self.messages

    def _finish_everything(self) -> None:
        """Whatever happened, a lone worker can bring the job to its end."""
        if not self.messages:
            return
        for owner in ("ann", "bob"):
            self.store.leases.give_back_all(owner)
        for ref in self.store.planning.dispatchable(MANY) + self.store.planning.dispatched():
            claimed = self.store.leases.claim(ref.id, ref.epoch, "last")
            assert claimed is not None
            results: list[NewResult] = answers(claimed)
            assert self.store.leases.finish(ref.id, ref.epoch, "last", results)
        job = self.store.jobs.get(self.job_id)
        assert job.ended == job.total == BATCHES * EACH
        assert (job.state is JobState.CANCELLED) == self.cancelled


class PostgresLeaseProtocol(LeaseProtocol):
    """The same on PostgreSQL; whoever runs it says who lends databases."""

    schemas: Schemas

    def open_store(self) -> Store:
        return Store(self.place.enter_context(self.schemas.lent()))

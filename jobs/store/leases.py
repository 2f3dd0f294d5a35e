"""Leases: a worker claims a micro-batch, computes it and finishes it, once.

A lease is fenced by owner, epoch and state. Whoever takes a lease back raises the epoch, or ends
the micro-batch. Results that come later are thrown away.
"""

from collections.abc import Sequence
from operator import attrgetter

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.records import (
    ClaimedMicroBatch,
    ClaimedRequest,
    MicroBatchRef,
    NewResult,
    RequestError,
)
from nightjar.jobs.states import JobState, MicroBatchState
from nightjar.jobs.store.bodies import load_body
from nightjar.jobs.store.body_rows import Bodies, Row
from nightjar.jobs.store.common import FAULT_STATUS, REF_COLUMNS, AnyRow, now, set_running
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.holding import HeldLeases, hold, hold_all
from nightjar.jobs.store.membership import MEMBERS, unfinished
from nightjar.jobs.store.outcomes import Outcomes
from nightjar.jobs.store.segments import unpack_segments
from nightjar.jobs.store.tables import (
    IS_LEASED,
    job,
    micro_batch,
    micro_batch_tokens,
    request,
)
from nightjar.jobs.store.token_ids import unpack_asked, unpack_token_ids
from nightjar.jobs.tallies import ComputeCost

# Built once, as each micro-batch uses them: building costs more than running.
_mb = micro_batch.c
_OWNING_JOB = [
    sa.select(column).where(job.c.id == _mb.job_id).scalar_subquery().label(f"job_{column.name}")
    for column in (job.c.cancel_requested, job.c.state)
]
_TOKENS = [
    sa.select(column)
    .where(micro_batch_tokens.c.micro_batch_id == _mb.id)
    .scalar_subquery()
    .label(column.name)
    for column in (micro_batch_tokens.c.token_ids, micro_batch_tokens.c.asked)
]
_CLAIM, _CLAIM_OF_SEVERAL = (
    sa.update(micro_batch)
    .where(
        _mb.id == sa.bindparam("claimed"),
        _mb.epoch == sa.bindparam("at_epoch"),
        of_model,
        _mb.state.in_([MicroBatchState.READY, MicroBatchState.DISPATCHED]),
    )
    .values(
        state=MicroBatchState.LEASED,
        owner=sa.bindparam("by"),
        attempts=_mb.attempts + 1,
        leased_at=sa.bindparam("at", type_=_mb.leased_at.type),
    )
    .returning(*_mb, *_OWNING_JOB, *_TOKENS)
    for of_model in (
        _mb.fingerprint == sa.bindparam("of_model"),
        _mb.fingerprint.in_(sa.bindparam("of_model", expanding=True)),
    )
)
# The epoch stays, as nobody has computed it. The dispatcher finds it when the job goes on.
_LEAVE = (
    sa.update(micro_batch)
    .where(_mb.id == sa.bindparam("left"))
    .values(state=MicroBatchState.READY, owner=None, attempts=_mb.attempts - 1)
)
_CLAIMED_REQUESTS = (
    sa.select(
        request.c.id,
        request.c.row_index,
        request.c.custom_id,
        request.c.kind,
        request.c.segments,
        request.c.prompt_vector,
        request.c.adapter,
    )
    .where(MEMBERS)
    .order_by(request.c.id)
)


class Leases:
    """Micro-batches that workers compute: claim them, finish them, give them back."""

    def __init__(self, database: Database, outcomes: Outcomes) -> None:
        self._database = database
        self._outcomes = outcomes
        self._held = HeldLeases(outcomes)
        self._bodies = Bodies(database)

    def claim(
        self,
        micro_batch_id: int,
        epoch: int,
        owner: str,
        *fingerprints: str,
        live: bool = False,
    ) -> ClaimedMicroBatch | None:
        """Lease a micro-batch to `owner`; committed before the caller computes anything.

        `fingerprints` are of the models that the owner serves. Gives None if the micro-batch was
        planned for another model, if the message is stale or a duplicate, or if the job is paused
        or stopped: acknowledge the message and go on. The requests of a stopped job end. The first
        claim of a job sets it running. `live` as in `Database.write`.
        """
        statement = _CLAIM if len(fingerprints) <= 1 else _CLAIM_OF_SEVERAL
        of_model = "".join(fingerprints) if len(fingerprints) <= 1 else fingerprints

        def work(connection: Connection) -> ClaimedMicroBatch | None:
            key = {
                "claimed": micro_batch_id,
                "at_epoch": epoch,
                "of_model": of_model,
                "by": owner,
                "at": now(),
            }
            leased = connection.execute(statement, key).one_or_none()
            if leased is None:
                return None
            if leased.job_cancel_requested:
                self._held.end(connection, leased, (), MicroBatchState.CANCELLED)
                return None
            if leased.job_state == JobState.PAUSED:
                connection.execute(_LEAVE, {"left": leased.id})
                return None
            if leased.job_state == JobState.QUEUED:
                set_running(connection, leased.job_id)
            return self._claimed(connection, leased)

        # Not durable: if a power cut undoes a claim, `finish` throws its results away.
        return self._outcomes.write(work, durable=False, live=live)

    def finish(
        self,
        micro_batch_id: int,
        epoch: int,
        owner: str,
        results: Sequence[NewResult],
        *,
        cost: ComputeCost | None = None,
        live: bool = False,
    ) -> bool:
        """Land the outcomes of a leased micro-batch, in one transaction.

        Gives False if the lease is no longer this owner's: the results are thrown away. Every
        request needs its result; those of a stopped job may lack it and then end as stopped.
        Raises StoreError for a missing or a foreign result, and nothing lands. `cost` is kept for
        reports. `live` as in `Database.write`.
        """

        def work(connection: Connection) -> bool:
            return self._held.finish(connection, micro_batch_id, epoch, owner, results, cost)

        return self._outcomes.write(work, live=live)

    def fail(self, micro_batch_id: int, epoch: int, owner: str, error: RequestError) -> bool:
        """End a leased micro-batch with the same error for each request that has no outcome.

        Gives False if the lease is no longer this owner's.
        """

        def work(connection: Connection) -> bool:
            leased = hold(connection, micro_batch_id, epoch, owner)
            if leased is None:
                return False
            results = [
                NewResult(id_, FAULT_STATUS, None, error) for id_ in unfinished(connection, leased)
            ]
            self._held.end(connection, leased, results, MicroBatchState.DONE)
            return True

        return self._outcomes.write(work)

    def give_back(self, micro_batch_id: int, epoch: int, owner: str) -> bool:
        """Return a lease unfinished: the micro-batch is ready again, under the next epoch.

        A stopped job's micro-batch ends as cancelled instead. Gives False if the lease is no
        longer this owner's.
        """

        def work(connection: Connection) -> bool:
            leased = hold(connection, micro_batch_id, epoch, owner)
            if leased is None:
                return False
            self._held.release(connection, leased)
            return True

        return self._outcomes.write(work)

    def held_by(self, owner: str) -> list[MicroBatchRef]:
        """The micro-batches that this owner has leased."""
        statement = sa.select(*REF_COLUMNS).where(_mb.owner == owner, IS_LEASED)
        with self._database.reading() as connection:
            return [MicroBatchRef(*row) for row in connection.execute(statement)]

    def give_back_all(self, owner: str) -> int:
        """Give back every lease of a worker; returns how many there were."""

        def work(connection: Connection) -> int:
            held = hold_all(connection, owner)
            for leased in held:
                self._held.release(connection, leased)
            return len(held)

        return self._outcomes.write(work)

    def _claimed(self, connection: Connection, leased: AnyRow) -> ClaimedMicroBatch:
        held = {} if leased.token_ids is None else unpack_token_ids(leased.token_ids)
        members = list(held) or list(unfinished(connection, leased))
        key = {"micro_batch": leased.id, "of_job": leased.job_id, "members": members}
        rows = connection.execute(_CLAIMED_REQUESTS, key).all()
        asked = unpack_asked(leased.asked, held)
        if not asked:  # of a planner of the version before
            wanted = sorted(
                (Row(id_, index) for id_, index, *_ in rows), key=attrgetter("row_index")
            )
            asked = self._bodies.read(connection, leased.job_id, wanted)
        requests = [
            ClaimedRequest(
                id_,
                index,
                custom_id,
                kind,
                load_body(asked[id_]),
                # A planner of two versions before has put them into the request's row.
                held[id_] if id_ in held else unpack_segments(segments),
                *named,
            )
            for id_, index, custom_id, kind, segments, *named in rows
        ]
        return ClaimedMicroBatch(
            id=leased.id,
            epoch=leased.epoch,
            job_id=leased.job_id,
            kind=leased.kind,
            bucket=leased.bucket,
            size=leased.size,
            tokens=leased.tokens,
            isolated=leased.isolated,
            fingerprint=leased.fingerprint,
            live=leased.live,
            attempts=leased.attempts,
            crashes=leased.crashes,
            requests=requests,
        )

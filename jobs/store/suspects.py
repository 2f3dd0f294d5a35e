"""Suspects: requests that were in flight when their compute process or their worker died.

Nobody can tell which of them caused it. So their micro-batch is split in two, and each half is
computed with nothing else beside it. A half that crashes again is split again. A crash counts only
against a request that is alone in its micro-batch. A request that ends without a crash is a suspect
no more. All of it is in SQL, so that it also goes on after the death of the worker.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.records import NewResult
from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.store.common import FAULT_STATUS, AnyRow, now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.holding import (
    CRASHED_CODE,
    HeldLeases,
    check_members,
    close,
    hold,
    hold_all,
    note_occupied,
)
from nightjar.jobs.store.membership import unfinished
from nightjar.jobs.store.outcomes import Outcomes
from nightjar.jobs.store.parts import in_parts_of
from nightjar.jobs.store.stop_reasons import find_stop
from nightjar.jobs.store.tables import micro_batch, request, worker
from nightjar.jobs.store.token_ids import drop_token_ids, move_token_ids
from nightjar.jobs.workers import Crash


class Suspects:
    """Requests under suspicion: report a crash, split what was in flight, count the crashes."""

    def __init__(self, database: Database, outcomes: Outcomes) -> None:
        self._database = database
        self._outcomes = outcomes
        self._held = HeldLeases(outcomes)

    def add(
        self,
        micro_batch_id: int,
        epoch: int,
        owner: str,
        crash: Crash,
        answered: Sequence[NewResult] = (),
    ) -> bool:
        """End a lease whose computing crashed; its unanswered requests become suspects.

        `answered` are the outcomes that came before the crash; they land. A suspect that was alone
        is ready again; with its last allowed crash it fails. Gives False if the lease is no longer
        this owner's: nothing lands.
        """

        def work(connection: Connection) -> bool:
            leased = hold(connection, micro_batch_id, epoch, owner)
            if leased is None:
                return False
            self._suspect(connection, leased, crash, answered)
            return True

        return self._outcomes.write(work)

    def add_owner(self, owner: str, crash: Crash, counter: int | None = None) -> int:
        """End every lease of a dead worker like that; returns how many there were.

        `counter` is the value by which the worker was judged dead. If it has moved since, the
        worker lives and keeps its leases.
        """

        def work(connection: Connection) -> int:
            if counter is not None and _counter(connection, owner) != counter:
                return 0
            held = hold_all(connection, owner)
            for leased in held:
                self._suspect(connection, leased, crash, ())
            return len(held)

        # Followers that did not fit wait for the sweeper: leases come first.
        return self._database.write(work)

    def _suspect(
        self,
        connection: Connection,
        leased: AnyRow,
        crash: Crash,
        answered: Sequence[NewResult],
    ) -> None:
        given = {item.request_id for item in answered}
        indexes = unfinished(connection, leased, given)
        check_members(leased.id, given, indexes.keys())
        suspects = [id_ for id_ in indexes if id_ not in given]
        if leased.isolated:
            note_occupied(connection, leased)
        if find_stop(connection, leased.job_id):
            self._held.end(connection, leased, answered, MicroBatchState.CANCELLED)
        elif not suspects:
            self._held.end(connection, leased, answered, MicroBatchState.DONE)
        elif leased.isolated and leased.size == 1:
            self._count_crash(connection, leased, crash, suspects[0])
        else:
            close(connection, leased.id, MicroBatchState.SPLIT, answered)
            middle = (len(suspects) + 1) // 2
            for part in filter(None, (suspects[:middle], suspects[middle:])):
                isolate(connection, leased, leased.id, part)
            drop_token_ids(connection, leased.id)
            self._outcomes.land(connection, leased.job_id, answered, indexes)

    def _count_crash(
        self, connection: Connection, leased: AnyRow, crash: Crash, request_id: int
    ) -> None:
        columns = micro_batch.c
        counted = columns.worker_deaths if crash.of_worker else columns.crashes
        if getattr(leased, counted.name) + 1 < crash.allowed:
            self._held.release(connection, leased, counted)
            return
        crashes = leased.crashes + leased.worker_deaths + 1
        times = "once" if crashes == 1 else f"{crashes} times"
        message = f"computed alone {times} and never answered; the last time {crash.reason}"
        failure = NewResult.failure(request_id, CRASHED_CODE, message, status=FAULT_STATUS)
        self._held.end(connection, leased, [failure], MicroBatchState.DONE)


def _counter(connection: Connection, owner: str) -> int:
    """The worker's counter, locked until the transaction ends."""
    known = sa.select(worker.c.counter).where(worker.c.owner == owner).with_for_update()
    return connection.scalar(known) or 0


def isolate(connection: Connection, origin: AnyRow, origin_id: int, members: Sequence[int]) -> None:
    """Move requests of a micro-batch into a ready one that is computed alone.

    `origin` has the columns of the micro-batch that they leave. It keeps their token ids.
    """
    values = {
        "job_id": origin.job_id,
        "kind": origin.kind,
        "bucket": origin.bucket,
        "size": len(members),
        "tokens": origin.tokens * len(members) // origin.size,  # their share; shown, not relied on
        "state": MicroBatchState.READY,
        "epoch": 0,
        "attempts": 0,
        "crashes": 0,
        "isolated": True,
        "fingerprint": origin.fingerprint,
        "planned_at": now(),
    }
    made = sa.insert(micro_batch).values(values).returning(micro_batch.c.id)
    new_id = connection.execute(made).scalar_one()
    move_token_ids(connection, origin_id, new_id, members)
    connection.execute(
        sa.update(request)
        .where(request.c.id.in_(members), in_parts_of(request.c.id, members))
        .values(micro_batch_id=new_id)
    )

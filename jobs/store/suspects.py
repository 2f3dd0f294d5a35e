"""Suspects: requests that were in flight when their compute process or their worker died.

Which of them is guilty nobody can tell, so their micro-batch is split in two, each half is computed
with nothing else beside it, and a half that dies again is split again. Only a request that is alone
in its micro-batch is counted against; the innocent ones end with their first quiet run. All of it
stands in SQL, so it goes on where it was when the worker died too.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.records import Crash, MicroBatchState, NewResult
from nightjar.jobs.store.base import FAULT_STATUS, AnyRow
from nightjar.jobs.store.holding import (
    HoldingPart,
    check_members,
    find_stop,
    hold,
    hold_all,
    unfinished,
)
from nightjar.jobs.store.tables import micro_batch, request, worker

CRASHED_CODE = "compute_lost"


class SuspectStore(HoldingPart):
    """What whoever saw a crash asks for."""

    def suspect(
        self,
        micro_batch_id: int,
        epoch: int,
        owner: str,
        crash: Crash,
        answered: Sequence[NewResult] = (),
    ) -> bool:
        """End a lease whose computing crashed; its unanswered requests become suspects.

        `answered` are the outcomes that came before the crash; they land. A lone
        suspect is ready again, or, with its last allowed crash, fails. False if the
        lease was not this owner's any more: nothing lands.
        """

        def work(connection: Connection) -> bool:
            leased = hold(connection, micro_batch_id, epoch, owner)
            if leased is None:
                return False
            self._suspect(connection, leased, crash, answered)
            return True

        return self._write_landing(work)

    def suspect_owner(self, owner: str, crash: Crash, counter: int | None = None) -> int:
        """The same for every lease of a dead worker; returns how many there were.

        `counter` is the one that the worker was judged by: if it has moved since, the worker
        lives, and keeps its leases.
        """

        def work(connection: Connection) -> int:
            if counter is not None and _counter(connection, owner) != counter:
                return 0
            held = hold_all(connection, owner)
            for leased in held:
                self._suspect(connection, leased, crash, ())
            return len(held)

        # Followers that are left wait for the sweeper's own turn: leases come first.
        return self._database.write(work)

    def _suspect(
        self,
        connection: Connection,
        leased: AnyRow,
        crash: Crash,
        answered: Sequence[NewResult],
    ) -> None:
        indexes = unfinished(connection, leased.id)
        given = {item.request_id for item in answered}
        check_members(leased.id, given, indexes.keys())
        suspects = [id_ for id_ in indexes if id_ not in given]
        if find_stop(connection, leased.job_id):
            self._end(connection, leased, answered, MicroBatchState.CANCELLED)
        elif not suspects:
            self._end(connection, leased, answered, MicroBatchState.DONE)
        elif leased.isolated and leased.size == 1:
            self._count_crash(connection, leased, crash, suspects[0])
        else:
            self._close(connection, leased.id, MicroBatchState.SPLIT)
            middle = (len(suspects) + 1) // 2
            for part in filter(None, (suspects[:middle], suspects[middle:])):
                isolate(connection, leased, part)
            self._land(connection, leased.job_id, answered, indexes)

    def _count_crash(
        self, connection: Connection, leased: AnyRow, crash: Crash, request_id: int
    ) -> None:
        columns = micro_batch.c
        counted = columns.worker_deaths if crash.of_worker else columns.crashes
        if getattr(leased, counted.name) + 1 < crash.allowed:
            self._release(connection, leased, counted)
            return
        crashes = leased.crashes + leased.worker_deaths + 1
        times = "once" if crashes == 1 else f"{crashes} times"
        message = f"computed alone {times} and never answered; the last time {crash.reason}"
        failure = NewResult.failure(request_id, CRASHED_CODE, message, status=FAULT_STATUS)
        self._end(connection, leased, [failure], MicroBatchState.DONE)


def _counter(connection: Connection, owner: str) -> int:
    """The worker's counter, which does not move before the transaction ends."""
    known = sa.select(worker.c.counter).where(worker.c.owner == owner).with_for_update()
    return connection.scalar(known) or 0


def isolate(connection: Connection, origin: AnyRow, members: Sequence[int]) -> None:
    """Move requests of a micro-batch into a ready one of their own, to be computed alone.

    `origin` has the columns of the micro-batch that they leave.
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
    }
    made = sa.insert(micro_batch).values(values).returning(micro_batch.c.id)
    connection.execute(
        sa.update(request)
        .where(request.c.id.in_(members))
        .values(micro_batch_id=connection.execute(made).scalar_one())
    )

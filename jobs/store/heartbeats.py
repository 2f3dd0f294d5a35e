"""Signs of life: each worker raises a counter, and the sweeper sees whether it moves."""

from datetime import timedelta

import sqlalchemy as sa

from nightjar.jobs.records import JsonObject
from nightjar.jobs.store.common import now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.json_text import dump_json, load_json
from nightjar.jobs.store.tables import IS_LEASED, micro_batch, worker
from nightjar.jobs.workers import ComputeSeconds, WorkerHeartbeat, WorkerStatus

_mb = micro_batch.c
_SECONDS = ComputeSeconds.__slots__
MOST_STATUSES = 200


class Heartbeats:
    """What workers write of themselves, and who reads it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def beat(self, owner: str, seconds: ComputeSeconds, status: JsonObject | None = None) -> None:
        """Raise the worker's counter, as a sign that it lives.

        `seconds` is what its compute processes have spent since the worker started. `status` says
        what it does now; without one, the last status goes.
        """
        fresh = self._database.insert(worker).values(
            owner=owner,
            counter=1,
            seen_at=now(),
            engine_s=seconds.engine_s,
            load_s=seconds.load_s,
            status=None if status is None else dump_json(status),
        )
        written = {name: fresh.excluded[name] for name in ("seen_at", "status", *_SECONDS)}
        statement = fresh.on_conflict_do_update(
            index_elements=[worker.c.owner], set_={"counter": worker.c.counter + 1, **written}
        )
        # With the limit of a probe: a beat that takes longer is no sign of life. Not durable: the
        # sweeper sees that a counter changes, so a lost beat costs nothing, and hundreds of workers
        # wait for no disk and no standby.
        self._database.write(
            lambda connection: connection.execute(statement), durable=False, probe=True
        )

    def compute_seconds(self) -> ComputeSeconds:
        """The sum over all workers of what their last beats said; ended workers count too."""
        sums = [sa.func.coalesce(sa.func.sum(worker.c[name]), 0.0) for name in _SECONDS]
        with self._database.reading() as connection:
            return ComputeSeconds(*connection.execute(sa.select(*sums)).one())

    def statuses(self, most: int = MOST_STATUSES) -> list[WorkerStatus]:
        """Return what workers that have beaten within a day said last, the latest sign first.

        At most `most`; the sweeper's own signs are not among them.
        """
        statement = (
            sa.select(worker.c.owner, worker.c.seen_at, worker.c.status)
            .where(worker.c.seen_at > now() - timedelta(days=1), worker.c.status.is_not(None))
            .order_by(worker.c.seen_at.desc(), worker.c.owner)
            .limit(most)
        )
        with self._database.reading() as connection:
            rows = connection.execute(statement).all()
        return [WorkerStatus(owner, seen_at, load_json(text)) for owner, seen_at, text in rows]

    def of_lease_holders(self) -> list[WorkerHeartbeat]:
        """The counters of the workers that hold leases; 0 for one that never beat."""
        statement = (
            sa.select(_mb.owner, sa.func.coalesce(worker.c.counter, 0))
            .select_from(micro_batch)
            .outerjoin(worker, worker.c.owner == _mb.owner)
            .where(_mb.owner.is_not(None), IS_LEASED)
            .distinct()
        )
        with self._database.reading() as connection:
            return [WorkerHeartbeat(owner, count) for owner, count in connection.execute(statement)]

    def living(self, silent_after_s: float) -> int:
        """Return how many GPU workers have beaten within so many seconds, by their clocks."""
        since = worker.c.seen_at > now() - timedelta(seconds=silent_after_s)
        count = sa.select(sa.func.count()).where(since, worker.c.status.is_not(None))
        with self._database.reading() as connection:
            return connection.scalar(count) or 0

    def recent(self) -> list[WorkerHeartbeat]:
        """The counters of the workers that have beaten within a day."""
        since = worker.c.seen_at > now() - timedelta(days=1)
        statement = sa.select(worker.c.owner, worker.c.counter).where(since)
        with self._database.reading() as connection:
            return [WorkerHeartbeat(*row) for row in connection.execute(statement)]

"""Signs of life of `nightjar worker tasks`, of which any number may run."""

from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.store.common import now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.schedule_tables import schedule, task_runner
from nightjar.jobs.workers import WorkerHeartbeat

_KEPT = timedelta(days=1)
_NEEDED = sa.select(sa.exists().where(sa.not_(schedule.c.paused), schedule.c.file_id.is_(None)))


class TaskRunners:
    """What these processes write of themselves, and who reads it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, owner: str) -> None:
        """Give the first sign of life, and forget processes that gave their last one a day ago."""
        old = sa.delete(task_runner).where(task_runner.c.seen_at < now() - _KEPT)

        def work(connection: Connection) -> None:
            connection.execute(old)
            self._beat(connection, owner)

        self._database.write(work, durable=False)

    def beat(self, owner: str) -> None:
        """Give a sign of life: raise the counter."""
        self._database.write(lambda connection: self._beat(connection, owner), durable=False)

    def _beat(self, connection: Connection, owner: str) -> None:
        fresh = self._database.insert(task_runner).values(owner=owner, counter=1, seen_at=now())
        raised = {"counter": task_runner.c.counter + 1, "seen_at": fresh.excluded.seen_at}
        statement = fresh.on_conflict_do_update(index_elements=[task_runner.c.owner], set_=raised)
        connection.execute(statement)

    def end(self, owner: str) -> None:
        """Forget a process that ends."""
        gone = sa.delete(task_runner).where(task_runner.c.owner == owner)
        self._database.write(lambda connection: connection.execute(gone), durable=False)

    def recent(self, within_s: float = _KEPT.total_seconds()) -> list[WorkerHeartbeat]:
        """The counters of processes with a sign within so many seconds, by their own clocks."""
        since = task_runner.c.seen_at > now() - timedelta(seconds=within_s)
        found = sa.select(task_runner.c.owner, task_runner.c.counter).where(since)
        with self._database.reading() as connection:
            return [WorkerHeartbeat(*row) for row in connection.execute(found)]

    def are_needed(self) -> bool:
        """Whether there is a schedule of a task that is not paused."""
        with self._database.reading() as connection:
            return bool(connection.scalar(_NEEDED))

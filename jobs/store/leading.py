"""Leaders: of several processes that could do the same work, one does it.

The row of a leader has an epoch, which rises whenever the lead changes hands, and a counter, which
the owner raises while it lives. Each observer judges by its own monotonic clock whether a counter
stands still (pipeline/queue/leadership.py): no wall clock takes part.
"""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.store.database import Database
from nightjar.jobs.store.tables import leader
from nightjar.jobs.workers import Leader

_row = leader.c
_said = sa.case((_row.protocol_epoch == _row.epoch, sa.func.coalesce(_row.protocol, 0)), else_=0)
_FIELDS = [_row.name, _row.owner, _row.epoch, _row.counter, _said.label("said")]


class Leaders:
    """Who leads, and how the lead changes hands."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, name: str) -> Leader | None:
        """Who leads under this name; None if nobody ever has."""
        with self._database.reading() as connection:
            found = connection.execute(sa.select(*_FIELDS).where(_row.name == name)).one_or_none()
        return None if found is None else Leader(*found)

    def take(self, name: str, owner: str, seen: Leader | None, protocol: int = 0) -> Leader | None:
        """Take the lead from the leader that was `seen`; None if that one has changed since.

        `protocol` says what the new leader can do.
        """
        epoch = 1 if seen is None else seen.epoch + 1
        values = {"owner": owner, "epoch": epoch, "counter": 0}
        values |= {"protocol": protocol, "protocol_epoch": epoch}
        if seen is None:
            fresh = self._database.insert(leader).values(name=name, **values)
            taken = fresh.on_conflict_do_nothing(index_elements=[_row.name]).returning(*_FIELDS)
            return self._taken(taken)
        unchanged = (_row.name == name, _row.epoch == seen.epoch, _row.counter == seen.counter)
        moved = sa.update(leader).where(*unchanged, _row.owner.is_not_distinct_from(seen.owner))
        return self._taken(moved.values(values).returning(*_FIELDS))

    def renew(self, held: Leader) -> bool:
        """Raise the counter of a leader; False if it has lost the lead."""
        return self._change(held, counter=_row.counter + 1)

    def resign(self, held: Leader) -> bool:
        """Give up the lead, so that the next leader need not wait; False if it was lost before."""
        return self._change(held, owner=None)

    def _taken(self, statement: sa.sql.base.Executable) -> Leader | None:
        def work(connection: Connection) -> Leader | None:
            row = connection.execute(statement).one_or_none()
            return None if row is None else Leader(*row)

        return self._database.write(work)

    def _change(self, held: Leader, **values: object) -> bool:
        own = (_row.name == held.name, _row.owner == held.owner, _row.epoch == held.epoch)
        statement = sa.update(leader).where(*own).values(**values)
        return bool(self._database.write(lambda connection: connection.execute(statement).rowcount))

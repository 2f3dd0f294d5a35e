"""Leaders: of several processes that could do the same, one does, and the others watch it.

A leader's lease has an epoch, raised whenever it changes hands, and a counter, raised by its owner
while it lives. Whether a counter stands still is for each observer to judge by its own monotonic
clock (pipeline/leadership.py): no wall clock takes part.
"""

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.records import Leader
from nightjar.jobs.store.base import StorePart
from nightjar.jobs.store.tables import leader

_row = leader.c
_FIELDS = [_row[name] for name in Leader.__slots__]


class LeaderStore(StorePart):
    """What processes that may lead ask for."""

    def leader(self, name: str) -> Leader | None:
        """Who leads; None if nobody ever has."""
        with self._database.reading() as connection:
            found = connection.execute(sa.select(*_FIELDS).where(_row.name == name)).one_or_none()
        return None if found is None else Leader(*found)

    def take_lead(self, name: str, owner: str, seen: Leader | None) -> Leader | None:
        """Lead in the place of what was `seen` there; None if that has changed since."""
        if seen is None:
            fresh = self._database.insert(leader).values(name=name, owner=owner, epoch=1, counter=0)
            taken = fresh.on_conflict_do_nothing(index_elements=[_row.name]).returning(*_FIELDS)
            return self._taken(taken)
        unchanged = (_row.name == name, _row.epoch == seen.epoch, _row.counter == seen.counter)
        moved = sa.update(leader).where(*unchanged, _row.owner.is_not_distinct_from(seen.owner))
        values = {"owner": owner, "epoch": seen.epoch + 1, "counter": 0}
        return self._taken(moved.values(values).returning(*_FIELDS))

    def renew_lead(self, held: Leader) -> bool:
        """Raise the counter of a leader that lives; False if it leads no more."""
        return self._change(held, counter=_row.counter + 1)

    def resign(self, held: Leader) -> bool:
        """Leave the lead, so that nobody has to wait; False if it was lost before."""
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

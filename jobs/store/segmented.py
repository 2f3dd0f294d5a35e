"""Landing a big upload on SQLite: in segments, so that others write in between.

SQLite lets one process write at a time. Half a million rows in one transaction would keep every
result from landing for seconds. So the rows come first, in segments, under a job id that no job has
yet: nothing finds them. The job's own row comes last, and makes all of them visible at once.

The table of leaders notes who lands, with a counter that rises with each segment. If a submitter
dies, the sweeper deletes its rows (`UnfinishedUploads.drop`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import StoreUnavailableError
from nightjar.jobs.states import RequestState
from nightjar.jobs.store.body_rows import delete_packs
from nightjar.jobs.store.columns import BigId
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.following import rows_that_follow
from nightjar.jobs.store.staging import insert_packs
from nightjar.jobs.store.tables import job, leader, request, result
from nightjar.jobs.store.turns import Turns
from nightjar.jobs.workers import Leader

SEGMENT_ROWS = 10_000
_DROPPED_PER_STEP = 5_000
_PREFIX = "landing "
_COLUMNS = ["job_id", "row_index", "line", "custom_id", "kind", "state"]

# A temporary table of the connection, like that of the staged rows.
_led = sa.Table(
    "nightjar_staged_follower",
    sa.MetaData(),
    sa.Column("row_index", BigId, primary_key=True, autoincrement=False),
    sa.Column("first", sa.BigInteger, nullable=False),  # the row that it follows
    prefixes=["TEMPORARY"],
)


class SegmentedLanding:
    """Lands the staged rows of one job.

    Args:
        database: A SQLite database.
        connection: The submitter's own, outside of a transaction.
        staged: Its table of staged rows.
        job_id: The job that the rows are of.
        owner: Who lands, unlike any other.
        reject: Inserts failed results for the staged rows that meet a condition.
    """

    def __init__(
        self,
        database: Database,
        connection: Connection,
        staged: sa.Table,
        job_id: str,
        owner: str,
        reject: Callable[[sa.ColumnElement[bool]], None],
    ) -> None:
        self._database = database
        self._connection = connection
        self._staged = staged
        self._job_id = job_id
        self._owner = owner
        self._reject = reject
        self._own = (leader.c.name == _name(job_id), leader.c.owner == owner)

    def run(self, total: int, finish: Callable[[], bool]) -> None:
        """Land `total` rows; `finish` inserts the job, in the last transaction.

        If `finish` gives False, there is to be no such job, and the rows are deleted.

        Raises:
            StoreUnavailableError: The sweeper has taken this process for dead.
        """
        connection = self._connection
        with _without_foreign_keys(connection):
            with connection.begin():  # in tables of this connection alone
                self._mark_duplicates()
                self._find_followers()
            with self._database.landing(connection):
                values = {"name": _name(self._job_id), "owner": self._owner}
                connection.execute(sa.insert(leader).values(**values, epoch=1, counter=0))
            wanted = False
            try:
                turns = Turns(self._database)
                for start in range(0, total, SEGMENT_ROWS):
                    with self._database.landing(connection):
                        self._renew()
                        self._insert(start)
                    turns.give()
                with self._database.landing(connection):
                    self._renew()
                    wanted = finish()
                    if wanted:
                        connection.execute(sa.delete(leader).where(*self._own))
            finally:
                if not wanted:
                    drop_landing(self._database, self._job_id)

    def _renew(self) -> None:
        raised = sa.update(leader).where(*self._own).values(counter=leader.c.counter + 1)
        if not self._connection.execute(raised).rowcount:
            raise StoreUnavailableError(
                "the upload took too long to land and was taken back; send it again"
            )

    def _mark_duplicates(self) -> None:
        """Reject rows that repeat a custom_id; their errors name the first line."""
        row, first = self._staged.c, self._staged.alias("first")
        connection = self._connection
        index = sa.Index("nightjar_staged_custom_id", row.custom_id)
        index.create(connection)
        self._staged.indexes.discard(index)
        same = (first.c.custom_id == row.custom_id, first.c.error_code.is_(None))
        earlier = sa.exists().where(*same, first.c.row_index < row.row_index)
        first_line = (
            sa.select(sa.cast(first.c.line, sa.Text))
            .where(*same)
            .order_by(first.c.row_index)
            .limit(1)
            .scalar_subquery()
        )
        connection.execute(
            sa.update(self._staged)
            .where(row.error_code.is_(None), earlier)
            .values(duplicate_error(row, first_line) | {"kind": None})
        )

    def _find_followers(self) -> None:
        """Keep which row each row follows."""
        _led.drop(self._connection, checkfirst=True)
        _led.create(self._connection)
        self._connection.execute(
            sa.insert(_led).from_select(["row_index", "first"], rows_that_follow(self._staged))
        )

    def _insert(self, start: int) -> None:
        """Insert one segment: leaders before their followers, then rejected rows."""
        row = self._staged.c
        here = row.row_index.between(start, start + SEGMENT_ROWS - 1)
        follows = sa.exists().where(_led.c.row_index == row.row_index)
        self._insert_rows(RequestState.QUEUED, here & row.error_code.is_(None) & ~follows)
        ahead = request.alias("ahead")
        leader_id = (
            sa.select(ahead.c.id)
            .where(ahead.c.job_id == self._job_id, ahead.c.row_index == _led.c.first)
            .scalar_subquery()
        )
        following = (
            self._values(RequestState.FOLLOWING)
            .add_columns(leader_id)
            .join(_led, _led.c.row_index == row.row_index)
            .where(here)
            .order_by(row.row_index)
        )
        into = sa.insert(request).from_select([*_COLUMNS, "leader_id"], following)
        self._connection.execute(into)
        insert_packs(self._connection, self._job_id, start, start + SEGMENT_ROWS - 1)
        rejected = here & row.error_code.is_not(None)
        self._insert_rows(RequestState.FAILED, rejected)
        self._reject(rejected)

    def _insert_rows(self, state: RequestState, where: sa.ColumnElement[bool]) -> None:
        rows = self._values(state).where(where).order_by(self._staged.c.row_index)
        self._connection.execute(sa.insert(request).from_select(_COLUMNS, rows))

    def _values(self, state: RequestState) -> sa.Select[Any]:
        row = self._staged.c
        values = [row.row_index, row.line, row.custom_id, row.kind]
        return sa.select(sa.literal(self._job_id), *values, sa.literal(state.value))


class UnfinishedUploads:
    """Uploads that land in segments: the sweeper drops those whose submitter has died."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> list[Leader]:
        """The uploads that are landing in segments; `name` is the job's id."""
        fields = (leader.c.name, leader.c.owner, leader.c.epoch, leader.c.counter)
        statement = sa.select(*fields).where(leader.c.name.startswith(_PREFIX))
        with self._database.reading() as connection:
            found = connection.execute(statement).all()
        return [Leader(row.name.removeprefix(_PREFIX), *row[1:]) for row in found]

    def drop(self, job_id: str) -> int:
        """Delete the rows that a dead submitter has left; returns how many."""
        return drop_landing(self._database, job_id)


def drop_landing(database: Database, job_id: str) -> int:
    """Delete the rows of a landing, in steps; the submitter lands nothing more."""
    name = _name(job_id)

    def fence(connection: Connection) -> bool:
        known = sa.select(job.c.id).where(job.c.id == job_id)
        if connection.scalar(known) is not None:
            return False  # it has landed
        connection.execute(sa.update(leader).where(leader.c.name == name).values(owner=None))
        return True

    dropped, turns = 0, Turns(database)
    if database.write(fence):
        while step := database.write(partial(_drop_some, job_id=job_id)):
            dropped += step
            turns.give()
    database.write(
        lambda connection: connection.execute(sa.delete(leader).where(leader.c.name == name))
    )
    return dropped


def _drop_some(connection: Connection, job_id: str) -> int:
    row = request.c
    some = sa.select(row.id, row.row_index).where(row.job_id == job_id).order_by(row.row_index)
    found = connection.execute(some.limit(_DROPPED_PER_STEP)).all()
    if found:
        ids = [one.id for one in found]
        connection.execute(sa.delete(result).where(result.c.request_id.in_(ids)))
        connection.execute(sa.delete(request).where(row.id.in_(ids)))
        delete_packs(connection, job_id, found[-1].row_index)
    return len(found)


def duplicate_error(row: Any, first_line: sa.ScalarSelect[Any]) -> dict[str, Any]:  # noqa: ANN401
    """The error of a row that repeats a custom_id."""
    message = (
        sa.literal("line ")
        + sa.cast(row.line, sa.Text)
        + ", custom_id: was already used on line "
        + first_line
        + "; give each line one of its own"
    )
    return {
        "error_code": "duplicate_custom_id",
        "error_message": message,
        "error_param": "custom_id",
    }


def _name(job_id: str) -> str:
    return f"{_PREFIX}{job_id}"


@contextmanager
def _without_foreign_keys(connection: Connection) -> Iterator[None]:
    """Allow rows before their job's; after the block the connection is as it was."""
    driver: Any = connection.connection.driver_connection
    driver.execute("PRAGMA foreign_keys = OFF")  # only outside of a transaction
    try:
        yield
    finally:
        if driver.in_transaction:
            connection.rollback()
        driver.execute("PRAGMA foreign_keys = ON")

"""Frees the parts of files that nobody can see any more, in bounded steps.

A file that was deleted, has expired or was abandoned is first marked. Then its parts are deleted,
some in each transaction. Its row stays for a while: a client that deletes what it lists asks for
the next page behind a deleted file.
"""

import math
import time
from collections.abc import Collection
from datetime import timedelta
from functools import partial

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.file_records import FileState
from nightjar.jobs.store.common import now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.file_tables import file, file_part
from nightjar.jobs.store.files import Files
from nightjar.jobs.store.turns import Turns

PARTS_PER_STEP = 8  # of 1 MiB at most
FILES_PER_SWEEP = 500
KEPT_S = 3_600.0
"""So long the row of a deleted file stays, for listings that go on behind it."""


class FileSweeping:
    """What the sweeper does with files."""

    def __init__(self, database: Database, files: Files) -> None:
        self._database = database
        self._files = files

    def uploading(self) -> list[tuple[str, int]]:
        """(id, counter) of files that are being uploaded."""
        statement = (
            sa.select(file.c.id, file.c.counter)
            .where(file.c.state == FileState.UPLOADING)
            .limit(FILES_PER_SWEEP)
        )
        with self._database.reading() as connection:
            return [(id_, counter) for id_, counter in connection.execute(statement)]

    def take_back(self, file_id: str, counter: int) -> bool:
        """Give up the upload if its counter is still `counter`; return whether it was given up."""
        still = (file.c.id == file_id, file.c.counter == counter)
        statement = (
            sa.update(file)
            .where(*still, file.c.state == FileState.UPLOADING)
            .values(state=FileState.DELETING)
        )
        return self._database.write(
            lambda connection: bool(connection.execute(statement).rowcount), durable=False
        )

    def sweep_files(self, patience_s: float = math.inf) -> int:
        """Free files that have expired or are to be deleted, and forget those that are gone.

        Returns how many parts went.

        No step begins after `patience_s` seconds; the next call goes on with the rest.
        """
        deadline = time.monotonic() + patience_s
        expired, forgotten = self._due(FileState.PROCESSED), self._due(FileState.DELETED)
        if expired:
            self._database.write(partial(self._expire, ids=expired), durable=False)
        if forgotten:
            self._database.write(partial(_forget, ids=forgotten), durable=False)
        turns = Turns(self._database)
        freed = 0
        for file_id in self._deleting():
            more = True
            while more:
                step, more = self._database.write(partial(_free, file_id=file_id), durable=False)
                freed += step
                if time.monotonic() >= deadline:
                    return freed
                turns.give()
        return freed

    def _due(self, state: FileState) -> list[str]:
        """Files of this state whose time is over."""
        statement = (
            sa.select(file.c.id)
            .where(file.c.state == state, file.c.expires_at <= now())
            .order_by(file.c.expires_at)
            .limit(FILES_PER_SWEEP)
        )
        with self._database.reading() as connection:
            return list(connection.scalars(statement))

    def _deleting(self) -> list[str]:
        statement = (
            sa.select(file.c.id).where(file.c.state == FileState.DELETING).limit(FILES_PER_SWEEP)
        )
        with self._database.reading() as connection:
            return list(connection.scalars(statement))

    def _expire(self, connection: Connection, ids: Collection[str]) -> None:
        locked = sa.select(file.c.id).where(file.c.id.in_(ids), file.c.state == FileState.PROCESSED)
        found = connection.scalars(locked.order_by(file.c.id).with_for_update()).all()
        free = [id_ for id_ in found if not self._files.is_in_use(connection, id_)]
        if free:
            statement = sa.update(file).where(file.c.id.in_(free))
            connection.execute(statement.values(state=FileState.DELETING))


def _free(connection: Connection, file_id: str) -> tuple[int, bool]:
    """Delete some parts of a file; returns how many, and whether there may be more."""
    part = file_part.c
    some = sa.select(part.number).where(part.file_id == file_id).limit(PARTS_PER_STEP)
    freed = connection.execute(
        sa.delete(file_part).where(part.file_id == file_id, part.number.in_(some))
    ).rowcount
    if freed == PARTS_PER_STEP:
        return freed, True
    connection.execute(
        sa.update(file)
        .where(file.c.id == file_id, file.c.state == FileState.DELETING)
        .values(state=FileState.DELETED, expires_at=now() + timedelta(seconds=KEPT_S))
    )
    return freed, False


def _forget(connection: Connection, ids: Collection[str]) -> None:
    connection.execute(sa.delete(file).where(file.c.id.in_(ids), file.c.state == FileState.DELETED))

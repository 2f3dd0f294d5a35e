"""Prompt vectors: named, versioned, never changed once they are stored."""

import hashlib

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import StoreError
from nightjar.jobs.records import PromptVector
from nightjar.jobs.store.common import now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.tables import prompt_vector

_row = prompt_vector.c
_FIELDS = [_row[name] for name in PromptVector.__slots__]


class Vectors:
    """Prompt vectors by name and version."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, name: str, data: bytes, length: int, width: int, sha256: str) -> PromptVector:
        """Store vectors as the name's newest version; the same bytes again change nothing.

        `data` is a safetensors file of `length` vectors of `width` numbers. Raises
        StoreError if `sha256` (hex) is not the digest of `data`.
        """
        if hashlib.sha256(data).hexdigest() != sha256:
            raise StoreError(f"prompt vector {name!r}: the sha256 is not that of its bytes")

        def work(connection: Connection) -> PromptVector | None:
            newest = _newest(connection, name)
            if newest is not None and newest.sha256 == sha256:
                return newest
            version = newest.version + 1 if newest else 1
            record = PromptVector(name, version, sha256, length, width, data)
            values = {column.name: getattr(record, column.name) for column in _FIELDS}
            statement = self._database.insert(prompt_vector).values(**values, created_at=now())
            inserted = connection.scalar(
                statement.on_conflict_do_nothing(
                    index_elements=[_row.name, _row.version]
                ).returning(_row.id)
            )
            return None if inserted is None else record

        # None: somebody else stored this version at the same moment.
        while (stored := self._database.write(work)) is None:
            pass
        return stored

    def get(self, name: str, version: int | None = None) -> PromptVector | None:
        """The vectors of this name and version, by default the newest; None if there are none."""
        with self._database.reading() as connection:
            return _newest(connection, name, version)


def _newest(connection: Connection, name: str, version: int | None = None) -> PromptVector | None:
    statement = sa.select(*_FIELDS).where(_row.name == name)
    if version is not None:
        statement = statement.where(_row.version == version)
    found = connection.execute(statement.order_by(_row.version.desc()).limit(1)).one_or_none()
    return None if found is None else PromptVector(*found)

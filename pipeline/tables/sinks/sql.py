"""A sink in a table of the user's database: staged in steps, then upserted by key at once."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.records import ResultRecord
from nightjar.pipeline.tables.databases import (
    DatabaseUrlError,
    database_url,
    first_line,
    open_database,
    shown_url,
)
from nightjar.pipeline.tables.keys import Keys
from nightjar.pipeline.tables.sinks.batches import ResultBatches
from nightjar.pipeline.tables.sinks.columns import ERRORS
from nightjar.pipeline.tables.sinks.config import SAME, SinkConfig
from nightjar.pipeline.tables.sinks.places import check_room
from nightjar.pipeline.tables.sinks.sink import SinkCounts, SinkRefusedError, SinkWriteError
from nightjar.pipeline.tables.sinks.sql_merging import is_ours, merge, note
from nightjar.pipeline.tables.sinks.sql_staging import Staging, set_up
from nightjar.pipeline.tables.sinks.sql_tables import Target, find_target, prefix_of
from nightjar.pipeline.tables.sinks.swapping import PlaceTakenError, locked

_LOCK_S = 30.0
_LOCK_POLL_S = 0.5


class SqlSink:
    """Writes into one table, or into one for answers and one for failed rows.

    Args:
        config: The `[sink]` table, with `sql`.
        batches: Builds rows with answers and errors.
        keys: The key columns.
        run: Names the results; a killed `write` of the same run is continued.
        environment: Where `env:NAME` is looked up.

    Raises:
        SinkRefusedError: The URL cannot be used.
    """

    def __init__(
        self,
        config: SinkConfig,
        batches: ResultBatches,
        keys: Keys,
        *,
        run: str,
        environment: Mapping[str, str],
    ) -> None:
        if config.sql is None:
            raise SinkRefusedError("the sink names no table of a database")
        self._sql = config.sql
        self._errors = None if config.errors == SAME else config.errors
        self._overwrite = config.overwrite
        self._batches = batches
        self._keys = keys
        self._run = run
        try:
            self._url = database_url(self._sql.url, environment)
            self._engine = open_database(self._url)
        except DatabaseUrlError as error:
            raise SinkRefusedError(f"sink.sql.url: {error}") from error
        self._is_sqlite = self._engine.dialect.name == "sqlite"
        driver: Any = self._engine.dialect.loaded_dbapi  # COPY raises the driver's own errors
        self._errors_of_database = (sa.exc.SQLAlchemyError, driver.Error)

    @property
    def target(self) -> str:
        """What the sink writes to, for messages."""
        return f"the table {self._sql.table} of {shown_url(self._url)}"

    def check(self) -> None:
        """Do everything with no rows, and take it back: rights, columns, constraints."""
        try:
            with self._engine.connect() as connection, connection.begin() as transaction:
                if self._is_sqlite:
                    check_room(_file_of(connection).parent)
                target, errors = self._targets(connection)
                self._check_mirrored(connection, target, errors)
                staging = Staging(connection, target, self._batches.schema, f"check {self._run}")
                staging.create()
                set_up(connection, target, errors)
                merge(connection, staging.table, target, errors, mirror=self._sql.mirror)
                note(connection, _both(target, errors), self._run)
                transaction.rollback()
        except sa.exc.SQLAlchemyError as error:
            raise SinkRefusedError(
                f"{self.target} cannot be written: {first_line(error)}; check the URL, and the "
                "rights to create tables, insert, update and delete"
            ) from error

    def resume_after(self) -> int:
        """The row index up to which a killed `write` of this run has staged the results."""
        try:
            with self._engine.begin() as connection:
                target, _ = self._targets(connection)
                return self._staging(connection, target).last()
        except sa.exc.SQLAlchemyError as error:
            raise SinkWriteError(self._failure(error)) from error

    def write(self, results: Iterable[ResultRecord]) -> SinkCounts:
        """Stage the results, then upsert them in one transaction; raises SinkWriteError."""
        try:
            with self._engine.connect() as connection, self._alone(connection):
                return self._write(connection, results)
        except PlaceTakenError as error:
            raise SinkWriteError(f"another run writes to {self.target}; wait for it") from error
        except SinkRefusedError as error:
            raise SinkWriteError(str(error)) from error
        except (*self._errors_of_database, pa.ArrowException, OverflowError) as error:
            raise SinkWriteError(self._failure(error)) from error

    def _write(self, connection: Connection, results: Iterable[ResultRecord]) -> SinkCounts:
        with connection.begin():
            target, errors = self._targets(connection)
            staging = self._staging(connection, target)
            staging.drop_others()
            staging.create()
            last = staging.last()
        left_out = 0
        for piece in self._batches.pieces(one for one in results if one.index > last):
            left_out += piece.left_out
            with connection.begin():
                staging.add(piece)
        with connection.begin():
            succeeded, failed = staging.counts()
            set_up(connection, target, errors)
            deleted = merge(connection, staging.table, target, errors, mirror=self._sql.mirror)
            note(connection, _both(target, errors), self._run)
            staging.drop()
        return SinkCounts(succeeded, failed, deleted, left_out)

    def _targets(self, connection: Connection) -> tuple[Target, Target | None]:
        full, names, create = self._batches.schema, self._keys.names, self._sql.create
        if self._errors is None:
            return find_target(connection, self._sql.table, full, names, create=create), None
        answers = pa.schema([field for field in full if field.name not in ERRORS])
        failed = self._batches.errors_schema
        return (
            find_target(connection, self._sql.table, answers, names, create=create),
            find_target(connection, self._errors, failed, names, create=create),
        )

    def _staging(self, connection: Connection, target: Target) -> Staging:
        return Staging(connection, target, self._batches.schema, self._run)

    def _check_mirrored(
        self, connection: Connection, target: Target, errors: Target | None
    ) -> None:
        for one in _both(target, errors):
            if self._sql.mirror and not self._overwrite and not is_ours(connection, one):
                raise SinkRefusedError(
                    f"mirror = true would delete rows of the table {one.name}, which Nightjar has "
                    "not written; leave mirror out, name another table, or set overwrite = true"
                )

    @contextmanager
    def _alone(self, connection: Connection) -> Iterator[None]:
        """Hold a lock on the table until the connection is closed, or the process is killed."""
        name = prefix_of(self._sql.table)
        if self._is_sqlite:
            file = _file_of(connection)
            connection.rollback()
            with locked(file.with_name(f".{file.name}.{name}lock")):
                yield
            return
        number = int.from_bytes(sha256(name.encode()).digest()[:8], "big", signed=True)
        deadline = time.monotonic() + _LOCK_S
        # The server may still be busy for a process that was killed.
        while not connection.scalar(sa.select(sa.func.pg_try_advisory_lock(number))):
            connection.rollback()
            if time.monotonic() > deadline:
                raise PlaceTakenError
            time.sleep(_LOCK_POLL_S)
        connection.commit()
        yield

    def _failure(self, error: Exception) -> str:
        return (
            f"{self.target} cannot be written: {first_line(error)}; its rows are as they were; "
            "what is staged is kept: run this again to continue"
        )


def _file_of(connection: Connection) -> Path:
    """The file of a SQLite database; its URL may name it in several ways."""
    return Path(connection.exec_driver_sql("PRAGMA database_list").one()[2])


def _both(target: Target, errors: Target | None) -> list[Target]:
    return [target] if errors is None else [target, errors]

"""Files: uploaded in parts, read part by part, listed for their tenant.

A part is at most 1 MiB, so that nobody holds a whole file in memory. Each part is written and read
in a transaction of its own. A file becomes visible when it is whole. A result file has no parts:
its content is a view of its job's results.
"""

import secrets
import time
from collections.abc import Iterator
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import FileInUseError, LostUploadError, UnknownFileError
from nightjar.jobs.file_records import (
    PART_BYTES,
    FileOrder,
    FileOutcome,
    FilePurpose,
    FileState,
    NewFile,
    StoredFile,
)
from nightjar.jobs.store.batch_rows import holds_file
from nightjar.jobs.store.common import now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.file_tables import file, file_part

_COLUMNS = [file.c[name] for name in StoredFile.__slots__]
_ARRIVING = (file.c.id == sa.bindparam("of_file"), file.c.state == FileState.UPLOADING)
_RAISE_COUNTER = sa.update(file).where(*_ARRIVING).values(counter=file.c.counter + 1)
_ADD_BYTES = _RAISE_COUNTER.values(bytes=file.c.bytes + sa.bindparam("more_bytes"))


class Files:
    """Stores files and reads them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, new_file: NewFile) -> str:
        """Begin a file, which is not visible before `end`; returns its id."""
        values = {
            "id": _new_file_id(),
            "tenant": new_file.tenant,
            "purpose": new_file.purpose,
            "filename": new_file.filename,
            "bytes": 0,
            "state": FileState.UPLOADING,
            "counter": 0,
            "created_at": now(),
        }
        # `end` makes it durable, together with all that comes before.
        self._database.write(lambda to: to.execute(sa.insert(file).values(values)), durable=False)
        return str(values["id"])

    def append(self, file_id: str, number: int, data: bytes) -> None:
        """Store the part of this number, which counts from 0.

        Raises:
            LostUploadError: The sweeper has taken the upload for abandoned.
        """
        if not 0 < len(data) <= PART_BYTES:
            raise ValueError(f"a part has 1 to {PART_BYTES} bytes, not {len(data)}")

        def work(connection: Connection) -> None:
            added = connection.execute(_ADD_BYTES, {"of_file": file_id, "more_bytes": len(data)})
            _check_arriving(added.rowcount)
            values = {"file_id": file_id, "number": number, "data": data}
            connection.execute(sa.insert(file_part).values(values))

        self._database.write(work, durable=False)

    def beat(self, file_id: str) -> None:
        """Show the sweeper that the file is still being uploaded."""
        self._database.write(
            lambda connection: connection.execute(_RAISE_COUNTER, {"of_file": file_id}),
            durable=False,
        )

    def end(
        self, file_id: str, size: int, sha256: str, expires_after_s: float | None = None
    ) -> StoredFile:
        """Make a file of `size` bytes visible, and durable; `sha256` is in hexadecimal.

        Raises:
            LostUploadError: The sweeper has taken the upload for abandoned.
        """

        def work(connection: Connection) -> StoredFile:
            created = connection.scalar(
                sa.select(file.c.created_at).where(*_ARRIVING, file.c.bytes == size),
                {"of_file": file_id},
            )
            if created is None:
                raise LostUploadError
            expires_at = None
            if expires_after_s is not None:
                expires_at = created + timedelta(seconds=expires_after_s)
            values = {"state": FileState.PROCESSED, "sha256": sha256, "expires_at": expires_at}
            statement = sa.update(file).where(*_ARRIVING).values(values)
            _check_arriving(connection.execute(statement, {"of_file": file_id}).rowcount)
            row = connection.execute(sa.select(*_COLUMNS).where(file.c.id == file_id)).one()
            return StoredFile(*row)

        return self._database.write(work)

    def abandon(self, file_id: str) -> None:
        """Give up a file that is being uploaded; the sweeper deletes its parts."""
        self._database.write(
            lambda connection: connection.execute(
                sa.update(file).where(*_ARRIVING).values(state=FileState.DELETING),
                {"of_file": file_id},
            ),
            durable=False,
        )

    def get(self, file_id: str, tenant: str) -> StoredFile:
        """The tenant's file; raises UnknownFileError."""
        with self._database.reading() as connection:
            return self.find(connection, file_id, tenant)

    def find(
        self, connection: Connection, file_id: str, tenant: str, *, lock: bool = False
    ) -> StoredFile:
        """The same within a caller's transaction.

        With `lock`, nobody can delete the file before that transaction ends. Raises
        UnknownFileError.
        """
        statement = sa.select(*_COLUMNS).where(
            file.c.id == file_id, file.c.tenant == tenant, *_visible()
        )
        if lock:
            statement = statement.with_for_update()
        found = connection.execute(statement).one_or_none()
        if found is None:
            raise UnknownFileError(file_id)
        return StoredFile(*found)

    def newest(
        self,
        limit: int,
        tenant: str,
        after: str | None = None,
        purpose: FilePurpose | None = None,
        order: FileOrder = "desc",
    ) -> list[StoredFile]:
        """The tenant's files, newest first, or oldest first with the order "asc".

        A page goes on behind the file `after`, which may have been deleted lately. Raises
        UnknownFileError if `after` is no file of this listing.
        """
        of_list = [file.c.tenant == tenant]
        if purpose is not None:
            of_list.append(file.c.purpose == purpose)
        statement = sa.select(*_COLUMNS).where(*of_list, *_visible()).limit(limit)
        statement = statement.order_by(file.c.id if order == "asc" else file.c.id.desc())
        with self._database.reading() as connection:
            if after is not None:
                known = sa.select(file.c.id).where(
                    *of_list, file.c.id == after, file.c.state != FileState.UPLOADING
                )
                if connection.scalar(known) is None:
                    raise UnknownFileError(after)
                behind = file.c.id > after if order == "asc" else file.c.id < after
                statement = statement.where(behind)
            return [StoredFile(*row) for row in connection.execute(statement)]

    def parts(self, file_id: str) -> Iterator[bytes]:
        """The content of an uploaded file, one part in memory at a time.

        Raises:
            UnknownFileError: There is no such file, or it is deleted while it is read.
        """
        with self._database.reading() as connection:
            whole = sa.select(file.c.bytes).where(
                file.c.id == file_id, file.c.state == FileState.PROCESSED
            )
            size = connection.scalar(whole)
        if size is None:
            raise UnknownFileError(file_id)
        number, read = 0, 0
        while read < size:
            data = self._part(file_id, number)
            if data is None:
                raise UnknownFileError(file_id)
            number, read = number + 1, read + len(data)
            yield data

    def delete(self, file_id: str, tenant: str) -> None:
        """Delete the tenant's file at once for every reader; the sweeper frees its parts in steps.

        Raises:
            UnknownFileError: The tenant has no such file.
            FileInUseError: It is needed still.
        """

        def work(connection: Connection) -> None:
            self.find(connection, file_id, tenant, lock=True)
            if self.is_in_use(connection, file_id):
                raise FileInUseError(file_id)
            deleted = sa.update(file).where(file.c.id == file_id)
            connection.execute(deleted.values(state=FileState.DELETING))

        self._database.write(work)

    def is_in_use(self, connection: Connection, file_id: str) -> bool:
        """Whether the file may not be deleted now, nor expire.

        This is the one place for such checks. A batch that is being validated reads its file.
        """
        return holds_file(connection, file_id)

    def add_result_file(
        self,
        connection: Connection,
        tenant: str,
        job_id: str,
        outcome: FileOutcome,
        size: int,
        filename: str,
        expires_at: datetime | None,
    ) -> str:
        """Add a file that shows a job's results, in the caller's transaction; returns its id."""
        values = {
            "id": _new_file_id(),
            "tenant": tenant,
            "purpose": FilePurpose.BATCH_OUTPUT,
            "filename": filename,
            "bytes": size,
            "state": FileState.PROCESSED,
            "counter": 0,
            "created_at": now(),
            "expires_at": expires_at,
            "job_id": job_id,
            "outcome": outcome,
        }
        connection.execute(sa.insert(file).values(values))
        return str(values["id"])

    def stored_bytes(self, tenant: str) -> int:
        """The bytes of the tenant's uploaded files, and of its uploads so far."""
        statement = sa.select(sa.func.sum(file.c.bytes)).where(
            file.c.tenant == tenant,
            file.c.purpose == FilePurpose.BATCH,
            file.c.state.in_([FileState.UPLOADING, FileState.PROCESSED]),
        )
        with self._database.reading() as connection:
            return int(connection.scalar(statement) or 0)

    def _part(self, file_id: str, number: int) -> bytes | None:
        statement = sa.select(file_part.c.data).where(
            file_part.c.file_id == file_id, file_part.c.number == number
        )
        with self._database.reading() as connection:
            return connection.scalar(statement)


def _visible() -> tuple[sa.ColumnElement[bool], ...]:
    """The conditions for a file that anybody may see: whole, not deleted, not expired."""
    lives_on = sa.or_(file.c.expires_at.is_(None), file.c.expires_at > now())
    return file.c.state == FileState.PROCESSED, lives_on


def _check_arriving(changed_rows: int) -> None:
    if not changed_rows:
        raise LostUploadError


def _new_file_id() -> str:
    """An id that sorts by creation and that nobody can guess."""
    return f"file-{time.time_ns() // 1_000_000:012x}{secrets.token_hex(8)}"

"""A sink of files: one for all rows, or one for answers and one for failed rows."""

import errno
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from nightjar.jobs.records import ResultRecord
from nightjar.pipeline.tables.sinks.batches import ResultBatches
from nightjar.pipeline.tables.sinks.places import Place
from nightjar.pipeline.tables.sinks.sink import SinkCounts, SinkWriteError
from nightjar.pipeline.tables.sinks.swapping import PlaceTakenError


class TableWriter(Protocol):
    """Writes batches of one schema into one file or folder."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch."""

    def close(self) -> None:
        """Finish what was written."""


@dataclass(frozen=True, slots=True)
class FileTarget:
    """A place, and how files are written there."""

    place: Place
    writer: Callable[[Path, pa.Schema], TableWriter]


class FileSink:
    """Writes every result anew, and replaces the files of the run before.

    Args:
        target: Of the answers.
        errors: Of failed rows; None where they are among the answers.
        batches: Builds the rows.
    """

    def __init__(
        self, target: FileTarget, errors: FileTarget | None, batches: ResultBatches
    ) -> None:
        self._target = target
        self._errors = errors
        self._batches = batches

    @property
    def target(self) -> str:
        """What the sink writes to, for messages."""
        return self._target.place.name

    def check(self) -> None:
        """Refuse places that cannot be written; raises SinkRefusedError."""
        for target in self._targets():
            target.place.check()

    def resume_after(self) -> int:
        """-1: a file that was not finished is written anew."""
        return -1

    def write(self, results: Iterable[ResultRecord]) -> SinkCounts:
        """Write the results and replace the files; raises SinkWriteError."""
        try:
            with ExitStack() as places:
                # The last one that is entered is moved to its place first: the answers.
                paths = [places.enter_context(one.place.replaced()) for one in self._targets()]
                return self._write(paths, results)
        except PlaceTakenError as error:
            raise SinkWriteError(f"{error}; wait for it, then run this again") from error
        except (OSError, pa.ArrowException) as error:
            raise SinkWriteError(self._failure(error)) from error

    def _targets(self) -> list[FileTarget]:
        return [self._target] if self._errors is None else [self._errors, self._target]

    def _write(self, paths: list[Path], results: Iterable[ResultRecord]) -> SinkCounts:
        schemas = [self._batches.errors_schema, self._batches.schema][-len(paths) :]
        writers = [
            target.writer(path, schema)
            for target, path, schema in zip(self._targets(), paths, schemas, strict=True)
        ]
        succeeded = failed = left_out = 0
        try:
            for piece in self._batches.pieces(results):
                writers[-1].write(piece.table)
                if piece.errors is not None:
                    writers[0].write(piece.errors)
                succeeded += piece.succeeded
                failed += piece.failed
                left_out += piece.left_out
        finally:
            for writer in writers:
                writer.close()
        return SinkCounts(succeeded, failed, left_out=left_out)

    def _failure(self, error: Exception) -> str:
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        mend = "then run this again"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            mend = f"free some room, {mend}"
        names = " and ".join(target.place.name for target in self._targets())
        return f"{names} cannot be written: {why}; what was there is as it was; {mend}"

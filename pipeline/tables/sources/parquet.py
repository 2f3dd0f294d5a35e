"""Rows of Parquet: a file, a folder of files, or a data set with partitions (`day=2026-11-24/`)."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from nightjar.pipeline.tables.sources.piece import MOST_BYTES, MOST_ROWS, Piece, SourceError, cut
from nightjar.pipeline.tables.sources.places import Listing, plain

SUFFIXES = (".parquet", ".pq")
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_LOCAL_BUFFER, _REMOTE_BUFFER = 1 << 20, 8 << 20


class ParquetSource:
    """Reads files one after the other, a few pages at a time."""

    is_fixed = True

    def __init__(self, listing: Listing) -> None:
        """Read the first file's footer.

        Raises:
            SourceError: It cannot be read.
        """
        self._listing = listing
        self._check_ends(listing.files[0])
        try:
            self._dataset = ds.FileSystemDatasetFactory(
                listing.filesystem,
                [info.path for info in listing.files],
                ds.ParquetFileFormat(),
                ds.FileSystemFactoryOptions(
                    partition_base_dir=listing.base,
                    partitioning=ds.HivePartitioning.discover(infer_dictionary=False),
                ),
            ).finish()
        except (OSError, pa.ArrowException) as error:
            raise self._error(listing.files[0], error) from error
        self.schema: pa.Schema = pa.schema(
            [(one.name, _plain_type(one.type)) for one in self._dataset.schema]
        )

    def batches(self, columns: Sequence[str]) -> Iterator[Piece]:
        """Yield the rows in the order of the files' paths."""
        wanted = pa.schema([self.schema.field(name) for name in columns])
        fragments = {one.path: one for one in self._dataset.get_fragments()}
        for info in self._listing.files:
            keys = ds.get_partition_keys(fragments[info.path].partition_expression)
            with self._open(info) as file:
                for rows in self._read(info, file, columns):
                    fitted = self._fit(info, rows, wanted, keys)
                    yield from map(Piece, cut(fitted))

    def digest(self) -> str:
        """Return a digest of the files' names, sizes and times."""
        return self._listing.digest()

    def count(self) -> int | None:
        """Return the number of rows, from the files' footers."""
        total = 0
        for info in self._listing.files:
            with self._open(info) as file:
                total += file.metadata.num_rows
        return total

    def _open(self, info: pafs.FileInfo) -> pq.ParquetFile:
        self._listing.check_unchanged(info)
        self._check_ends(info)
        size = _REMOTE_BUFFER if self._listing.is_remote else _LOCAL_BUFFER
        try:
            stream = self._listing.filesystem.open_input_file(info.path)
            # A row group may be a million rows: with a buffer its pages are read one by one.
            return pq.ParquetFile(stream, buffer_size=size, pre_buffer=False)
        except (OSError, pa.ArrowException) as error:
            raise self._error(info, error) from error

    def _read(
        self, info: pafs.FileInfo, file: pq.ParquetFile, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        there = [name for name in columns if name in file.schema_arrow.names]
        try:
            yield from file.iter_batches(batch_size=_rows_at_once(file.metadata), columns=there)
        except (OSError, pa.ArrowException) as error:
            raise self._error(info, error) from error

    def _fit(
        self,
        info: pafs.FileInfo,
        rows: pa.RecordBatch,
        wanted: pa.Schema,
        keys: dict[str, object],
    ) -> pa.RecordBatch:
        """Return the columns with the types of the first file; partitions become columns."""
        arrays = []
        for field in wanted:
            if field.name in rows.schema.names:
                array = rows.column(field.name)
            elif field.name in keys:
                array = pa.repeat(pa.scalar(keys[field.name], field.type), rows.num_rows)
            else:
                raise SourceError(
                    f"{self._listing.name(info)} has no column {field.name!r}, which other files "
                    "have; write the files with one schema"
                )
            try:
                arrays.append(array if array.type == field.type else pc.cast(array, field.type))
            except pa.ArrowException as error:
                raise SourceError(
                    f"{self._listing.name(info)}: the column {field.name!r} holds {array.type}, "
                    f"in other files {field.type}; write the files with one schema"
                ) from error
        return pa.record_batch(arrays, schema=wanted)

    def _check_ends(self, info: pafs.FileInfo) -> None:
        """Refuse a file that is cut off or encrypted; its last bytes tell."""
        name = self._listing.name(info)
        try:
            with self._listing.filesystem.open_input_file(info.path) as stream:
                size = stream.size()
                head = stream.read(4)
                stream.seek(max(0, size - 4))
                tail = stream.read(4)
        except (OSError, pa.ArrowException) as error:
            raise SourceError(f"{name}: {plain(error)}") from error
        if _ENCRYPTED in (head, tail):
            raise SourceError(_is_encrypted(name))
        if head != _MAGIC:
            raise SourceError(f"{name} is not a Parquet file; name the right file or kind")
        if tail != _MAGIC or size < 12:
            raise SourceError(f"{name} is cut off: its end is missing; copy or write it again")

    def _error(self, info: pafs.FileInfo, error: Exception) -> SourceError:
        name, told = self._listing.name(info), plain(error)
        if "crypt" in told.lower():
            return SourceError(_is_encrypted(name))
        return SourceError(f"{name} is damaged ({told}); copy or write it again")


def _is_encrypted(name: str) -> str:
    return f"{name} is encrypted, which is not supported; decrypt it into a file of its own"


def _rows_at_once(metadata: pq.FileMetaData) -> int:
    """Return how many rows of the largest row group are about MOST_BYTES."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    largest = max((one.total_byte_size / max(one.num_rows, 1) for one in groups), default=1.0)
    return max(1, min(MOST_ROWS, int(MOST_BYTES / max(largest, 1.0))))


def _plain_type(found: pa.DataType) -> pa.DataType:
    """Return the type without dictionary encoding, 64-bit offsets and views, at any depth."""
    if pa.types.is_dictionary(found):
        return _plain_type(found.value_type)
    if pa.types.is_large_string(found) or pa.types.is_string_view(found):
        return pa.string()
    if pa.types.is_large_list(found) or pa.types.is_list(found):
        return pa.list_(_plain_type(found.value_type))
    if pa.types.is_struct(found):
        return pa.struct([(one.name, _plain_type(one.type)) for one in found])
    return found

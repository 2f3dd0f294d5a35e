"""Results as Parquet: one file, or a folder of files, with row groups of bounded size."""

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from nightjar.pipeline.tables.keys import to_json
from nightjar.pipeline.tables.sinks.config import SinkConfig
from nightjar.pipeline.tables.sinks.sink import SinkRefusedError, SinkWriteError

GROUP_BYTES = 32 << 20  # a row group is written when it has so many bytes, or all its rows
PENDING_BYTES = 64 << 20  # of all partitions together
MOST_OPEN = 64
MOST_PARTITIONS = 10_000
_MARK = b"nightjar.sink"
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"  # how Hive names the folder of an empty text


@dataclass(frozen=True, slots=True)
class ParquetOptions:
    """How Parquet files are written.

    mark: In the names of a folder's files. A reader that has listed the folder of the run before
        misses a file then, instead of mixing two runs.
    """

    rows_per_group: int
    rows_per_file: int
    compression: str
    partition_by: tuple[str, ...]
    mark: str

    @classmethod
    def of(cls, config: SinkConfig, run: str) -> "ParquetOptions":
        """The options of a task file."""
        return cls(
            config.rows_per_group,
            config.rows_per_file,
            config.compression,
            config.partition_by,
            sha256(run.encode()).hexdigest()[:12],
        )


class ParquetFile:
    """Writes one file; a row group is kept in memory until it is written."""

    def __init__(self, path: Path, schema: pa.Schema, options: ParquetOptions) -> None:
        marked = schema.with_metadata({_MARK: b"1"})
        self._writer = pq.ParquetWriter(path, marked, compression=options.compression)
        self._schema = marked
        self._most_rows = options.rows_per_group
        self._pending: list[pa.RecordBatch] = []
        self._rows = 0
        self.pending_bytes = 0
        self.written = 0  # rows, those in memory included

    def write(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch."""
        while batch.num_rows:
            part = batch.slice(0, self._most_rows - self._rows)
            batch = batch.slice(part.num_rows)
            self._pending.append(part)
            self._rows += part.num_rows
            self.written += part.num_rows
            self.pending_bytes += part.nbytes
            if self._rows == self._most_rows or self.pending_bytes >= GROUP_BYTES:
                self.flush()

    def flush(self) -> None:
        """Write what is in memory as a row group."""
        if self._rows:
            group = pa.Table.from_batches(self._pending).replace_schema_metadata(
                self._schema.metadata
            )
            self._writer.write_table(group, row_group_size=self._rows)
            self._pending, self._rows, self.pending_bytes = [], 0, 0

    def close(self) -> None:
        """Finish the file."""
        try:
            self.flush()
        finally:
            self._writer.close()


class ParquetFolder:
    """Writes a folder of files; with `partition_by`, one folder a value as Hive names them.

    At most MOST_OPEN files are open. A partition that comes back later gets one more file.
    """

    def __init__(self, path: Path, schema: pa.Schema, options: ParquetOptions) -> None:
        self._path = path
        self._options = options
        self._schema = pa.schema([one for one in schema if one.name not in options.partition_by])
        self._open: OrderedDict[str, ParquetFile] = OrderedDict()
        self._files: dict[str, int] = {}  # how many each partition has

    def write(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch."""
        if not self._options.partition_by:
            self._add("", batch)
            return
        for folder, part in self._parts(batch):
            self._add(folder, part)
        while sum(one.pending_bytes for one in self._open.values()) > PENDING_BYTES:
            max(self._open.values(), key=lambda one: one.pending_bytes).flush()

    def close(self) -> None:
        """Finish every file; without rows there is one, which has the columns."""
        if not self._files:
            self._file("")
        while self._open:
            self._open.popitem()[1].close()

    def _parts(self, batch: pa.RecordBatch) -> list[tuple[str, pa.RecordBatch]]:
        """The folder and the rows of each partition that the batch has."""
        names = self._options.partition_by
        texts = [[_segment(one) for one in to_json(batch.column(name))] for name in names]
        folders: dict[tuple[str, ...], list[int]] = {}
        for row, values in enumerate(zip(*texts, strict=True)):
            folders.setdefault(values, []).append(row)
        plain = batch.select(self._schema.names)
        parts = []
        for values, rows in folders.items():
            folder = "/".join(
                f"{quote(name)}={value}" for name, value in zip(names, values, strict=True)
            )
            parts.append((folder, plain.take(rows)))
        return parts

    def _add(self, folder: str, batch: pa.RecordBatch) -> None:
        while batch.num_rows:
            file = self._file(folder)
            part = batch.slice(0, self._options.rows_per_file - file.written)
            file.write(part)
            batch = batch.slice(part.num_rows)
            if file.written == self._options.rows_per_file:
                self._open.pop(folder).close()

    def _file(self, folder: str) -> ParquetFile:
        if folder in self._open:
            self._open.move_to_end(folder)
            return self._open[folder]
        if len(self._open) == MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        number = self._files.get(folder, 0)
        if not number and len(self._files) == MOST_PARTITIONS:
            raise SinkWriteError(
                f"partition_by makes more than {MOST_PARTITIONS:,} folders; choose columns with "
                "fewer values"
            )
        self._files[folder] = number + 1
        place = self._path / folder
        place.mkdir(parents=True, exist_ok=True)
        name = f"part-{number:05d}-{self._options.mark}.parquet"
        file = ParquetFile(place / name, self._schema, self._options)
        self._open[folder] = file
        return file


def check_parquet_file(path: Path | pa.NativeFile, name: str) -> None:
    """Refuse a file that no sink has written; an empty one may be replaced.

    Raises:
        SinkRefusedError: It is such a file.
        OSError: It cannot be read.
    """
    if isinstance(path, Path) and not path.stat().st_size:
        return
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError):
        metadata = {}
    if _MARK not in metadata:
        raise SinkRefusedError(
            f"{name} is no file that Nightjar has written: move it away, name another path, or set "
            "overwrite = true to replace it"
        )


def check_parquet_folder(path: Path, *, overwrite: bool) -> None:
    """Refuse to replace a folder that holds anything but Parquet files of ours.

    overwrite: Parquet files of others may be replaced.

    Raises:
        SinkRefusedError: It holds something else.
        OSError: It cannot be read.
    """
    first: Path | None = None
    for found in path.rglob("*"):
        is_folder = found.is_dir() and not found.is_symlink()
        if not is_folder and (found.suffix != ".parquet" or not found.is_file()):
            raise SinkRefusedError(
                f"{path}/ would be replaced, and holds {found.relative_to(path)}, which is no "
                "Parquet file; name a folder of its own"
            )
        first = first if is_folder else first or found
    if first is not None and not overwrite:
        check_parquet_file(first, str(first))


def _segment(value: object) -> str:
    """A value as a part of a path, as readers of Hive's layout decode it."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return quote(text, safe=" ") or _NO_VALUE

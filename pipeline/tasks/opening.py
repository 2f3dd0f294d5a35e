"""Opens the source that a task file names."""

from collections.abc import Mapping

import pyarrow as pa

from nightjar.pipeline.tables.sources.csv_files import SUFFIXES as CSV_SUFFIXES
from nightjar.pipeline.tables.sources.csv_files import CsvSource
from nightjar.pipeline.tables.sources.database_urls import source_database
from nightjar.pipeline.tables.sources.json_lines import SUFFIXES as JSON_SUFFIXES
from nightjar.pipeline.tables.sources.json_lines import JsonLinesSource
from nightjar.pipeline.tables.sources.parquet import SUFFIXES as PARQUET_SUFFIXES
from nightjar.pipeline.tables.sources.parquet import ParquetSource
from nightjar.pipeline.tables.sources.piece import Source
from nightjar.pipeline.tables.sources.places import S3Options, list_files
from nightjar.pipeline.tables.sources.sql import Query, SqlSource
from nightjar.pipeline.tasks.task_file import TaskFile

_TYPES = {
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
}


def open_source(file: TaskFile, environment: Mapping[str, str]) -> Source:
    """Open the source of a task; paths are relative to the task file.

    Raises:
        SourceError: It cannot be read.
    """
    given, folder = file.task.source, file.folder
    s3 = None if given.s3 is None else S3Options(given.s3.endpoint, given.s3.region)
    if given.parquet is not None:
        return ParquetSource(list_files(given.parquet, folder, PARQUET_SUFFIXES, s3))
    if given.csv is not None:
        types = {name: _TYPES[kind] for name, kind in given.csv.types.items()}
        listing = list_files(given.csv.path, folder, CSV_SUFFIXES, s3)
        return CsvSource(listing, given.csv.delimiter, types)
    if given.jsonl is not None:
        return JsonLinesSource(list_files(given.jsonl, folder, JSON_SUFFIXES, s3))
    assert given.sql is not None  # noqa: S101 - the fields are checked
    asked = given.sql
    database = source_database(asked.url, folder, environment)
    return SqlSource(database, Query(asked.query, given.key, asked.timeout_s, asked.resume))

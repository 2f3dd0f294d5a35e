"""From the `[sink]` table of a task file to a sink that can be written."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pyarrow as pa

from nightjar.pipeline.tables.keys import Keys
from nightjar.pipeline.tables.sinks.batches import ResultBatches
from nightjar.pipeline.tables.sinks.columns import Answers
from nightjar.pipeline.tables.sinks.config import OBJECT_STORES, SinkConfig
from nightjar.pipeline.tables.sinks.files import FileSink, FileTarget
from nightjar.pipeline.tables.sinks.jsonl import JsonlFile, check_jsonl
from nightjar.pipeline.tables.sinks.parquet import (
    ParquetFile,
    ParquetFolder,
    ParquetOptions,
    check_parquet_file,
    check_parquet_folder,
)
from nightjar.pipeline.tables.sinks.places import LocalPlace, ObjectPlace, shown
from nightjar.pipeline.tables.sinks.sink import Sink, SinkRefusedError
from nightjar.pipeline.tables.sinks.sql import SqlSink


def make_sink(
    config: SinkConfig, answers: Answers, keys: Keys, *, run: str, environment: Mapping[str, str]
) -> Sink:
    """The sink that the configuration describes; nothing is opened or changed yet.

    Args:
        config: The `[sink]` table.
        answers: What decides the columns of the answers.
        keys: The key columns of its rows.
        run: The same for every `write` of the same results, another one when the results may
            differ: such as the job's id with the moment at which it ended.
        environment: Where `env:NAME` is looked up.

    Raises:
        SinkRefusedError: The options contradict the key columns, or the URL cannot be used.
    """
    try:
        # A database gets the errors of all rows, and divides the rows itself.
        with_errors = config.keeps_errors or config.sql is not None
        batches = ResultBatches(keys, answers, with_errors=with_errors)
    except ValueError as error:
        raise SinkRefusedError(str(error)) from error
    if config.sql is not None:
        return SqlSink(config, batches, keys, run=run, environment=environment)
    if strangers := [name for name in config.partition_by if name not in keys.names]:
        raise SinkRefusedError(
            f"partition_by names {', '.join(strangers)}, which is no key column; the key columns "
            f"are {', '.join(keys.names)}"
        )
    if len(config.partition_by) == len(keys.names):
        raise SinkRefusedError(
            "partition_by names every key column, so that each row would be a file of its own; "
            "name fewer"
        )
    errors = None
    if not config.keeps_errors:
        errors = _target(config, config.errors, batches.errors_schema, run)
    main = config.jsonl or config.parquet or ""
    return FileSink(_target(config, main, batches.schema, run), errors, batches)


def _target(config: SinkConfig, path: str, schema: pa.Schema, run: str) -> FileTarget:
    if config.jsonl is not None:
        return _jsonl(config, path, schema)
    options = ParquetOptions.of(config, run)
    folder = path.endswith("/")
    if path.startswith(OBJECT_STORES):
        return _object(config, path, options)
    writer = partial(ParquetFolder if folder else ParquetFile, options=options)

    def check(found: Path) -> None:
        if folder:
            check_parquet_folder(found, overwrite=config.overwrite)
        elif not config.overwrite:
            check_parquet_file(found, str(found))

    return FileTarget(LocalPlace(Path(path), folder, check), writer)


def _jsonl(config: SinkConfig, path: str, schema: pa.Schema) -> FileTarget:
    if path.startswith(OBJECT_STORES):
        raise SinkRefusedError(
            f"{shown(path)}: JSON lines go to a local file; use parquet, or copy the file"
        )

    def check(found: Path) -> None:
        if not config.overwrite:
            check_jsonl(found, schema.names)

    return FileTarget(LocalPlace(Path(path), False, check), JsonlFile)


def _object(config: SinkConfig, url: str, options: ParquetOptions) -> FileTarget:
    if url.endswith("/"):
        raise SinkRefusedError(
            f"{shown(url)}: an object store cannot replace a folder as a whole, so that readers "
            "would see old and new files together; name one object, such as "
            "s3://bucket/results.parquet"
        )

    def check(found: pa.NativeFile) -> None:
        if not config.overwrite:
            check_parquet_file(found, shown(url))

    return FileTarget(ObjectPlace(url, check), partial(ParquetFile, options=options))

"""Reads a query of PostgreSQL as Arrow, through ADBC: the extra `adbc`.

Faster than the cursor, and with less to say: an error among the rows has no code, and values out of
Arrow's range come as other values. So each batch is checked. What this module cannot read exactly
is left to the cursor, which goes on behind the last key and tells what is wrong.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from nightjar.pipeline.tables.sources.databases import ArrowStoppedError

_BATCH_BYTES = 1 << 20
_DRIVER = "adbc_driver_postgresql"
# The driver's types whose values are those of the cursor, and the cursor's types.
_SAME = {
    pa.int16(): pa.int64(),
    pa.int32(): pa.int64(),
    pa.int64(): pa.int64(),
    pa.float64(): pa.float64(),
    pa.bool_(): pa.bool_(),
    pa.string(): pa.string(),
    pa.binary(): pa.binary(),
    pa.date32(): pa.date32(),
    pa.timestamp("us"): pa.timestamp("us"),
    pa.timestamp("us", "UTC"): pa.timestamp("us", "UTC"),
}
_DAY_US = 86_400_000_000
# The days of the years 1 to 9999, counted from 1970. Python has no others, and the cursor neither.
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896


@contextmanager
def arrow_reading(
    place: str, query: str, timeout_s: int, schema: pa.Schema
) -> Iterator[Iterator[pa.RecordBatch]]:
    """Run a query that ends within a time, in a session that cannot write.

    Args:
        place: What libpq connects to, with the password.
        query: One SELECT.
        timeout_s: Of the whole query.
        schema: The columns as the cursor gives them.

    Raises:
        ArrowStoppedError: The cursor has to go on. Nothing that was yielded is wrong.
    """
    try:
        options: Any = importlib.import_module(_DRIVER).StatementOptions
        driver: Any = importlib.import_module(f"{_DRIVER}.dbapi")
    except ImportError as error:
        raise ArrowStoppedError from error
    try:
        with (
            driver.connect(place, autocommit=True) as connection,
            connection.cursor(
                adbc_stmt_kwargs={options.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)}
            ) as cursor,
        ):
            for name, value in _session(timeout_s).items():
                cursor.execute(f"SET {name} = {value}")
            cursor.execute(query)
            try:
                yield _checked(cursor.fetch_record_batch(), schema)
            finally:
                # Closing alone reads all rows that are left.
                with suppress(driver.Error):
                    cursor.adbc_cancel()
    except driver.Error as error:
        raise ArrowStoppedError from error


def _session(timeout_s: int) -> dict[str, str]:
    return {
        "default_transaction_read_only": "on",
        "default_transaction_isolation": "'repeatable read'",
        "statement_timeout": str(timeout_s * 1_000),
        "client_encoding": "'UTF8'",
    }


def _checked(reader: pa.RecordBatchReader, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield batches with the cursor's types; raises ArrowStoppedError."""
    found = reader.schema
    if found.names != schema.names or [_SAME.get(type_) for type_ in found.types] != schema.types:
        raise ArrowStoppedError
    while True:
        try:
            batch = reader.read_next_batch()
            batch.validate(full=True)  # a database may hold texts that are not UTF-8
        except StopIteration:
            return
        except (OSError, pa.ArrowException) as error:
            raise ArrowStoppedError from error
        if not all(map(_is_in_range, batch.columns)):
            raise ArrowStoppedError
        yield batch.cast(schema)


def _is_in_range(values: pa.Array) -> bool:
    """Whether dates and moments are those that Python has; `infinity` is none of them."""
    if pa.types.is_date32(values.type):
        first, last, numbers = _FIRST_DAY, _LAST_DAY, values.cast(pa.int32())
    elif pa.types.is_timestamp(values.type):
        first, last = _FIRST_DAY * _DAY_US, (_LAST_DAY + 1) * _DAY_US - 1
        numbers = values.cast(pa.int64())
    else:
        return True
    least, most = pc.min_max(numbers).as_py().values()
    return least is None or (least >= first and most <= last)

"""The lengths of result lines, for the sizes of result files: most are summed in SQL.

The line of most successes is a frame of fixed length around its custom id and its body. The
database sums those. A line of any other row is written, to see how long it is.
"""

from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from nightjar.jobs.batch_records import FileCount, RawResult, ResultLengths, ResultShape
from nightjar.jobs.store.answer_packs import body_octets
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.parts import InPartOf
from nightjar.jobs.store.result_rows import RECORD_COLUMNS, error_of
from nightjar.jobs.store.tables import request, result

PLAIN_STATUS = 200
_PLAIN = "-A-Za-z0-9_.:/ "  # JSON writes these as they are, a byte each
_DIGITS = 12  # of an id, at least
_MOST_DIGITS = 14
_IDS_IN_LINE = 2
_EMPTY = msgspec.Raw(b"")


def lengths_after(
    connection: Connection, database: Database, job_id: str, after: int, limit: int
) -> ResultLengths | None:
    """What tells the lengths of up to `limit` landed rows behind `after`; None without any."""
    row = result.c
    further = sa.case(
        *(
            (row.request_id >= 16**digits, _IDS_IN_LINE * (digits - _DIGITS + 1))
            for digits in range(_MOST_DIGITS - 1, _DIGITS - 1, -1)
        ),
        else_=0,
    )
    body_bytes = body_octets(is_sqlite=database.is_sqlite)
    plain_bytes = sa.func.length(request.c.custom_id) + body_bytes + further
    behind = (
        sa.select(
            row.row_index,
            sa.case((_is_plain(database), plain_bytes), else_=None).label("plain"),
        )
        .join(request, request.c.id == row.request_id)
        .where(*_of_job(job_id), row.row_index > after)
        .order_by(row.row_index)
        .limit(limit)
        .subquery()
    )
    counts = (sa.func.count(), sa.func.count(behind.c.plain), sa.func.sum(behind.c.plain))
    found = connection.execute(sa.select(*counts, sa.func.max(behind.c.row_index)))
    rows, plain, size, last = found.one()
    if not rows:
        return None
    others = [] if rows == plain else _others(connection, database, job_id, after, last)
    return ResultLengths(last, FileCount(plain, int(size or 0)), others)


def _others(
    connection: Connection, database: Database, job_id: str, after: int, last: int
) -> list[ResultShape]:
    """The rows behind `after` up to `last` that are not plain."""
    row = result.c
    columns: list[sa.ColumnElement[Any]] = [
        *(column for column in RECORD_COLUMNS if column is not row.body),
        body_octets(is_sqlite=database.is_sqlite).label("octets"),
    ]
    statement = (
        sa.select(*columns)
        .join(request, request.c.id == row.request_id)
        .where(*_of_job(job_id), row.row_index > after, row.row_index <= last)
        .where(~_is_plain(database))
        .order_by(row.row_index)
    )
    return [_shape(found) for found in connection.execute(statement)]


def _of_job(job_id: str) -> tuple[sa.ColumnElement[bool], ...]:
    ids = (result.c.request_id, request.c.id)
    return (result.c.job_id == job_id, *(InPartOf(id_, job_id) for id_ in ids))


def _is_plain(database: Database) -> sa.ColumnElement[bool]:
    """Whether the line of a row differs from that of others in its ids and its body alone."""
    row, custom_id = result.c, request.c.custom_id
    if database.is_sqlite:
        has_others = custom_id.bool_op("GLOB")(f"*[^{_PLAIN}]*")
    else:
        has_others = custom_id.bool_op("~")(f"[^{_PLAIN}]")
    return sa.and_(
        row.error_code.is_(None),
        row.reused.is_(None),
        sa.or_(row.body.is_not(None), row.pack_id.is_not(None)),
        row.status_code == PLAIN_STATUS,
        row.request_id < 16**_MOST_DIGITS,
        custom_id.is_not(None),
        ~has_others,
    )


def _shape(row: Row[Any]) -> ResultShape:
    error = error_of(row)
    body = _EMPTY if error is None else None
    record = RawResult(row.request_id, row.line, row.custom_id, row.status_code, body, error)
    return ResultShape(row.row_index, record, row.octets or 0, row.reused is not None)

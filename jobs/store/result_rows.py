"""Rows of the table of results as records, chosen by their size."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from nightjar.jobs.batch_records import RawResult
from nightjar.jobs.records import RequestError, ResultRecord
from nightjar.jobs.store.answer_packs import AnswerBodies, body_octets
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.json_text import dump_json, load_json
from nightjar.jobs.store.parts import InPartOf, in_parts_of
from nightjar.jobs.store.tables import request, result

Outcome = Literal["all", "succeeded", "failed"]

_ROW_BYTES = 256  # about what a line of output takes beside its body
RECORD_COLUMNS = [*result.c, request.c.line, request.c.custom_id]
_RAW_COLUMNS: Sequence[sa.Column[Any]] = (
    result.c.request_id,
    result.c.row_index,
    result.c.status_code,
    result.c.error_code,
    result.c.error_message,
    result.c.error_param,
    result.c.reused,
    result.c.pack_id,
    result.c.pack_place,
    request.c.line,
    request.c.custom_id,
)


class RawRows(NamedTuple):
    """Landed rows of a job behind the row `after`, up to `last`, and no more than `limit`."""

    job_id: str
    after: int
    last: int | None
    limit: int
    outcome: Outcome


def sizes_after(
    connection: Connection,
    database: Database,
    job_id: str,
    after: int,
    limit: int,
    outcome: Outcome,
    edge: int | None = None,
) -> Sequence[Row[Any]]:
    """(request_id, row_index, size) of landed rows behind `after`, and of one more than `limit`."""
    row = result.c
    statement = (
        sa.select(row.request_id, row.row_index, _size(database).label("size"))
        .where(
            row.job_id == job_id,
            InPartOf(row.request_id, job_id),
            row.row_index > after,
            *_with_outcome(outcome),
        )
        .order_by(row.row_index)
        .limit(limit + 1)
    )
    if edge is not None:
        statement = statement.where(row.row_index <= edge)
    return connection.execute(statement).all()


def fitting(rows: Sequence[Row[Any]], limit: int, max_bytes: int) -> Sequence[Row[Any]]:
    """The first rows that fit into a page; at least one, if there is one."""
    bytes_ = 0
    for number, row in enumerate(rows):
        bytes_ += row.size
        if number == limit or (number and bytes_ > max_bytes):
            return rows[:number]
    return rows


def fetch(
    connection: Connection,
    database: Database,
    ids: Sequence[int],
    bodies_of: AnswerBodies | None = None,
) -> list[ResultRecord]:
    """The outcomes of these requests, in this order.

    `bodies_of` is that of a reader who goes on with other requests.
    """
    rows = _rows_of(connection, database, ids)
    bodies = (bodies_of or AnswerBodies()).read(connection, rows)
    return [_record(row, bodies.get(row.request_id)) for row in rows]


def raw_page(
    connection: Connection,
    database: Database,
    within: RawRows,
    max_bytes: int,
    bodies_of: AnswerBodies,
) -> tuple[list[RawResult], int]:
    """The first of these outcomes, as many as a page holds, and the index of the last row.

    Their bodies are as they are stored, not parsed.
    """
    row = result.c
    statement: sa.Select[Any] = (
        sa.select(*_RAW_COLUMNS, _size(database).label("size"))
        .join(request, request.c.id == row.request_id)
        .where(
            row.job_id == within.job_id,
            InPartOf(row.request_id, within.job_id),
            InPartOf(request.c.id, within.job_id),
            row.row_index > within.after,
            *_with_outcome(within.outcome),
        )
        .order_by(row.row_index)
        .limit(within.limit)
    )
    if within.last is not None:
        statement = statement.where(row.row_index <= within.last)
    rows = fitting(connection.execute(statement).all(), within.limit, max_bytes)
    return _raw(connection, database, rows, bodies_of), rows[-1].row_index if rows else within.after


def fetch_raw(connection: Connection, database: Database, ids: Sequence[int]) -> list[RawResult]:
    """The outcomes of these requests, in this order, with bodies as they are stored."""
    found = {row.request_id: row for row in _listed(connection, database, ids, _RAW_COLUMNS)}
    return _raw(connection, database, [found[id_] for id_ in ids], AnswerBodies())


def _raw(
    connection: Connection, database: Database, rows: Sequence[Row[Any]], bodies_of: AnswerBodies
) -> list[RawResult]:
    places, alone = [], []
    for row in rows:
        if row.pack_id is not None:
            places.append((row.request_id, row.pack_id, row.pack_place))
        else:
            alone.append(row.request_id)
    bodies = bodies_of.in_packs(connection, places)
    if alone:
        columns = (result.c.request_id, result.c.body)
        for row in _listed(connection, database, alone, columns):
            if row.body is not None:
                bodies[row.request_id] = row.body.encode()
    return [_raw_result(row, bodies.get(row.request_id)) for row in rows]


def _rows_of(connection: Connection, database: Database, ids: Sequence[int]) -> Sequence[Row[Any]]:
    found = {row.request_id: row for row in _listed(connection, database, ids, RECORD_COLUMNS)}
    return [found[id_] for id_ in ids]


def _listed(
    connection: Connection, database: Database, ids: Sequence[int], columns: Sequence[Any]
) -> Iterable[Row[Any]]:
    """Columns of results and of their requests, in any order."""
    statement = (
        sa.select(*columns)
        .select_from(result)
        .join(request, request.c.id == result.c.request_id)
        .where(_is_listed(database, ids), in_parts_of(request.c.id, ids))
    )
    return connection.execute(statement) if ids else ()


def sizes_of(
    connection: Connection, database: Database, ids: Sequence[int], outcome: Outcome
) -> dict[tuple[int, int], int]:
    """The sizes of these requests' outcomes, by id and token of the landing."""
    if not ids:
        return {}
    row = result.c
    statement = sa.select(row.request_id, row.landing, _size(database)).where(
        _is_listed(database, ids), *_with_outcome(outcome)
    )
    return {(id_, token): size for id_, token, size in connection.execute(statement)}


def _size(database: Database) -> sa.ColumnElement[int]:
    """About how many bytes a line of output takes."""
    size = body_octets(is_sqlite=database.is_sqlite)
    message = sa.func.coalesce(sa.func.length(result.c.error_message), 0)
    return sa.func.coalesce(size, 0) + message + _ROW_BYTES


def _with_outcome(outcome: Outcome) -> Iterable[sa.ColumnElement[bool]]:
    failed = result.c.error_code.is_not(None)
    return {"all": (), "failed": (failed,), "succeeded": (~failed,)}[outcome]


def _is_listed(database: Database, ids: Sequence[int]) -> sa.ColumnElement[bool]:
    column = result.c.request_id
    if database.is_sqlite:
        listed = sa.func.json_each(json.dumps(ids)).table_valued("value")
        return column.in_(sa.select(listed.c.value))
    is_given = column == sa.any_(sa.literal(list(ids), sa.ARRAY(sa.BigInteger)))
    return sa.and_(is_given, in_parts_of(column, ids))


def _body(row: Row[Any], text: str) -> dict[str, Any]:
    """The answer's body; a reused answer gets an id of its own and says that it is reused."""
    body = load_json(text)
    if row.reused is None:
        return body
    kind, _, _ = str(body.get("id", "")).rpartition("-")
    return body | {"id": f"{kind}-{row.request_id}", "reused": row.reused.value}


def error_of(row: Row[Any]) -> RequestError | None:
    """The error of a row; None for a success."""
    if row.error_code is None:
        return None
    return RequestError(row.error_code, row.error_message, row.error_param)


def _raw_result(row: Row[Any], body: bytes | None) -> RawResult:
    if body is not None and row.reused is not None:
        body = dump_json(_body(row, body.decode())).encode()
    raw = None if body is None else msgspec.Raw(body)
    return RawResult(row.request_id, row.line, row.custom_id, row.status_code, raw, error_of(row))


def _record(row: Row[Any], body: str | None) -> ResultRecord:
    return ResultRecord(
        id=row.request_id,
        index=row.row_index,
        line=row.line,
        custom_id=row.custom_id,
        status_code=row.status_code,
        body=None if body is None else _body(row, body),
        error=error_of(row),
        prompt_tokens=row.prompt_tokens,
        completion_tokens=row.completion_tokens,
        requested_tokens=row.requested_tokens,
        saved_tokens=row.saved_tokens,
        finish_reason=row.finish_reason,
    )

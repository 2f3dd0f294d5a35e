"""Rows of the table of results as records, chosen by their size."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

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


def fetch_raw(
    connection: Connection,
    database: Database,
    ids: Sequence[int],
    bodies_of: AnswerBodies | None = None,
) -> list[RawResult]:
    """The same with bodies as they are stored, not parsed."""
    rows = _rows_of(connection, database, ids)
    bodies = (bodies_of or AnswerBodies()).read(connection, rows)
    return [_raw(row, bodies.get(row.request_id)) for row in rows]


def _rows_of(connection: Connection, database: Database, ids: Sequence[int]) -> Sequence[Row[Any]]:
    statement = (
        sa.select(*RECORD_COLUMNS)
        .join(request, request.c.id == result.c.request_id)
        .where(_is_listed(database, ids), in_parts_of(request.c.id, ids))
    )
    found = {row.request_id: row for row in connection.execute(statement)} if ids else {}
    return [found[id_] for id_ in ids]


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


def _raw(row: Row[Any], body: str | None) -> RawResult:
    if body is not None and row.reused is not None:
        body = dump_json(_body(row, body))
    raw = None if body is None else msgspec.Raw(body.encode())
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

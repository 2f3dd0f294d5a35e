"""Pages of results: bounded in rows and bytes, and honest about what is missing while a job runs.

In row order a page of a running job ends before the first row without outcome. In the order of
landing a client that asks on sees every result once, whatever lands meanwhile.
"""

import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from nightjar.jobs.errors import UnknownJobError
from nightjar.jobs.records import RequestError, ResultPage, ResultRecord
from nightjar.jobs.store.base import AnyRow, StorePart, load_json
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.landings import ids_from, is_numbered, number_some
from nightjar.jobs.store.tables import job, request, result

Outcome = Literal["all", "succeeded", "failed"]
Order = Literal["row", "landed"]
# An answer may fill megabytes (a ranking of 10,000 documents does), and a page is in memory whole.
PAGE_BYTES = 4 * 1024 * 1024
# So many rows are looked through for a page of successes or failures alone.
SCANNED_ROWS = 10_000
_ROW_BYTES = 256  # what a line of output takes beside its body, about

_RECORD_COLUMNS = [*result.c, request.c.line, request.c.custom_id]


class PagingStore(StorePart):
    """What clients of the API ask for, page by page."""

    def results_page(
        self,
        job_id: str,
        *,
        order: Order = "row",
        after: int = -1,
        limit: int = 1_000,
        outcome: Outcome = "all",
        max_bytes: int = PAGE_BYTES,
    ) -> ResultPage:
        """A page of landed outcomes behind `after`: a row's index, or a place in the landing order.

        A page holds at least one outcome, if there is one, however large it is.
        Raises UnknownJobError.
        """
        if order == "landed":
            self._number(job_id)
            return self._page_as_landed(job_id, after, limit, outcome, max_bytes)
        return self._page_by_row(job_id, after, limit, outcome, max_bytes)

    def _page_by_row(
        self, job_id: str, after: int, limit: int, outcome: Outcome, max_bytes: int
    ) -> ResultPage:
        with self._database.snapshot() as connection:
            standing = _standing(connection, job_id)
            edge, looked_at = None, 0
            if standing.finished_at is None:
                looked_at = limit + 1 if outcome == "all" else SCANNED_ROWS
                edge = _complete_to(connection, job_id, after, looked_at)
            sizes = sizes_after(connection, self._database, job_id, after, limit, outcome, edge)
            taken = fitting(sizes, limit, max_bytes)
            records = fetch(connection, self._database, [row.request_id for row in taken])
        if len(taken) < len(sizes):
            return ResultPage(records, taken[-1].row_index, has_more=True, complete=False)
        if edge is None:
            last = taken[-1].row_index if taken else after
            return ResultPage(records, last, has_more=False, complete=True)
        if edge == after + looked_at:  # no gap so far: the next page looks further
            return ResultPage(records, edge, has_more=True, complete=False)
        missing = edge + 1 if edge + 1 < standing.total else None
        return ResultPage(records, edge, has_more=False, complete=False, waits_for_row=missing)

    def _page_as_landed(
        self, job_id: str, after: int, limit: int, outcome: Outcome, max_bytes: int
    ) -> ResultPage:
        most = limit if outcome == "all" else SCANNED_ROWS
        with self._database.snapshot() as connection:
            standing = _standing(connection, job_id)
            entries = ids_from(connection, job_id, after + 1, most)
            sizes = _sizes_of(connection, self._database, [id_ for id_, _ in entries], outcome)
            ids: list[int] = []
            place, bytes_ = after, 0
            for id_, token in entries:
                # Another token: a retry has taken it back, and it stands where it landed again.
                size = sizes.get((id_, token))
                if size is not None:
                    bytes_ += size
                    if len(ids) == limit or (ids and bytes_ > max_bytes):
                        break
                    ids.append(id_)
                place += 1
            records = fetch(connection, self._database, ids)
        has_more = place + 1 < standing.landed
        complete = standing.finished_at is not None and not has_more
        return ResultPage(records, place, has_more=has_more, complete=complete)

    def _number(self, job_id: str) -> None:
        """Give places to what processes of the version before have landed."""
        with self._database.reading() as connection:
            if is_numbered(connection, job_id):
                return
        after: int | None = -1
        while after is not None:
            step = partial(number_some, job_id=job_id, after=after)
            after = self._database.write(step)


def sizes_after(
    connection: Connection,
    database: Database,
    job_id: str,
    after: int,
    limit: int,
    outcome: Outcome,
    edge: int | None = None,
) -> Sequence[Row[Any]]:
    """(request_id, row_index, size) of the landed rows behind `after`; one more than the limit."""
    row = result.c
    statement = (
        sa.select(row.request_id, row.row_index, _size(database).label("size"))
        .where(row.job_id == job_id, row.row_index > after, *_with_outcome(outcome))
        .order_by(row.row_index)
        .limit(limit + 1)
    )
    if edge is not None:
        statement = statement.where(row.row_index <= edge)
    return connection.execute(statement).all()


def fitting(rows: Sequence[Row[Any]], limit: int, max_bytes: int) -> Sequence[Row[Any]]:
    """The first of them that fit into a page; at least one, if there is one."""
    bytes_ = 0
    for number, row in enumerate(rows):
        bytes_ += row.size
        if number == limit or (number and bytes_ > max_bytes):
            return rows[:number]
    return rows


def fetch(connection: Connection, database: Database, ids: Sequence[int]) -> list[ResultRecord]:
    """The outcomes of these requests, in this order."""
    statement = (
        sa.select(*_RECORD_COLUMNS)
        .join(request, request.c.id == result.c.request_id)
        .where(_is_listed(database, ids))
    )
    found = {row.request_id: _record(row) for row in connection.execute(statement)} if ids else {}
    return [found[id_] for id_ in ids]


def _complete_to(connection: Connection, job_id: str, after: int, most: int) -> int:
    """The last row, of `most` behind `after`, before which none is without outcome."""
    row = result.c
    behind = (
        sa.select(row.row_index)
        .where(row.job_id == job_id, row.row_index > after)
        .order_by(row.row_index)
        .limit(most)
        .subquery()
    )
    index = behind.c.row_index
    place = sa.func.row_number().over(order_by=index)
    numbered = sa.select(index, (index - place).label("shift")).subquery()
    unbroken = sa.select(sa.func.max(numbered.c.row_index)).where(numbered.c.shift == after)
    found = connection.scalar(unbroken)
    return after if found is None else int(found)


def _standing(connection: Connection, job_id: str) -> AnyRow:
    columns = (job.c.total, job.c.landed, job.c.finished_at)
    found = connection.execute(sa.select(*columns).where(job.c.id == job_id)).one_or_none()
    if found is None:
        raise UnknownJobError(job_id)
    return found


def _sizes_of(
    connection: Connection, database: Database, ids: Sequence[int], outcome: Outcome
) -> dict[tuple[int, int], int]:
    """How large the outcomes of these requests are, by id and token of their landing."""
    if not ids:
        return {}
    row = result.c
    statement = sa.select(row.request_id, row.landing, _size(database)).where(
        _is_listed(database, ids), *_with_outcome(outcome)
    )
    return {(id_, token): size for id_, token, size in connection.execute(statement)}


def _size(database: Database) -> sa.ColumnElement[int]:
    """About how many bytes a line of output takes."""
    body = result.c.body
    if database.is_sqlite:  # octet_length is too new there
        octets = sa.func.length(sa.cast(body, sa.LargeBinary), type_=sa.BigInteger)
    else:  # reads no body
        octets = sa.func.octet_length(body, type_=sa.BigInteger)
    message = sa.func.coalesce(sa.func.length(result.c.error_message), 0)
    return sa.func.coalesce(octets, 0) + message + _ROW_BYTES


def _with_outcome(outcome: Outcome) -> Iterable[sa.ColumnElement[bool]]:
    failed = result.c.error_code.is_not(None)
    return {"all": (), "failed": (failed,), "succeeded": (~failed,)}[outcome]


def _is_listed(database: Database, ids: Sequence[int]) -> sa.ColumnElement[bool]:
    column = result.c.request_id
    if database.is_sqlite:
        listed = sa.func.json_each(json.dumps(ids)).table_valued("value")
        return column.in_(sa.select(listed.c.value))
    return column == sa.any_(sa.literal(list(ids), sa.ARRAY(sa.BigInteger)))


def _body(row: Row[Any]) -> dict[str, Any]:
    """The answer; one that was computed for another request says so, under an id of its own."""
    body = load_json(row.body)
    if row.reused is None:
        return body
    kind, _, _ = str(body.get("id", "")).rpartition("-")
    return body | {"id": f"{kind}-{row.request_id}", "reused": row.reused.value}


def _record(row: Row[Any]) -> ResultRecord:
    error = None
    if row.error_code is not None:
        error = RequestError(row.error_code, row.error_message, row.error_param)
    return ResultRecord(
        id=row.request_id,
        index=row.row_index,
        line=row.line,
        custom_id=row.custom_id,
        status_code=row.status_code,
        body=None if row.body is None else _body(row),
        error=error,
        prompt_tokens=row.prompt_tokens,
        completion_tokens=row.completion_tokens,
        requested_tokens=row.requested_tokens,
        saved_tokens=row.saved_tokens,
        finish_reason=row.finish_reason,
    )

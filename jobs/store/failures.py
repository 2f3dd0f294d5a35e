"""Failures of a job for people: grouped by reason, and row by row.

Both read from the index of failures. A million failures are grouped from the first and the last
ones, and the record says so.
"""

from typing import Any

import sqlalchemy as sa

from nightjar.jobs.overview_records import FailedRow, FailureReason, FailureReasons
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.parts import InPartOf
from nightjar.jobs.store.tables import request, result

GROUPED_FAILURES = 4_000  # from each end
SEARCHED_FAILURES = 4_000
_row = result.c
_job = sa.bindparam("of_job", type_=sa.String)
_failed = (_row.job_id == _job, InPartOf(_row.request_id, _job), _row.error_code.is_not(None))


def _end(order: sa.ColumnElement[Any]) -> sa.Subquery:
    return (
        sa.select(_row.row_index, _row.error_code)
        .where(*_failed)
        .order_by(order)
        .limit(GROUPED_FAILURES)
        .subquery()
    )


_first, _last = _end(_row.row_index), _end(_row.row_index.desc())
# A union drops what both ends hold.
_both = sa.union(sa.select(_first), sa.select(_last)).subquery()
_GROUPED = (
    sa.select(_both.c.error_code, sa.func.count(), sa.func.min(_both.c.row_index))
    .group_by(_both.c.error_code)
    .order_by(sa.func.count().desc(), _both.c.error_code)
)


class Failures:
    """Why rows of a job failed."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def reasons(self, job_id: str) -> FailureReasons:
        """Failures by error code; those of rows that were cancelled or expired, too."""
        with self._database.snapshot() as connection:
            groups = connection.execute(_GROUPED, {"of_job": job_id}).all()
            rows = [first for _, _, first in groups]
            told = sa.select(_row.row_index, _row.error_message, _row.error_param).where(
                _row.job_id == job_id,
                InPartOf(_row.request_id, job_id),
                _row.row_index.in_(rows),
            )
            said = {row.row_index: row for row in connection.execute(told)}
        reasons = [
            FailureReason(code, count, said[at].error_message or "", said[at].error_param, at)
            for code, count, at in groups
            if at in said
        ]
        seen = sum(one.rows for one in reasons)
        return FailureReasons(reasons, seen >= 2 * GROUPED_FAILURES)

    def rows(
        self, job_id: str, code: str, *, after: int = -1, limit: int = 50
    ) -> tuple[list[FailedRow], int | None]:
        """Failed rows of one code behind a row index, and where the next page begins.

        At most SEARCHED_FAILURES failures are looked at. None: there are no more.
        """
        behind = (
            sa.select(_row.request_id, _row.row_index, _row.error_code)
            .where(*_failed, _row.row_index > after)
            .order_by(_row.row_index)
            .limit(SEARCHED_FAILURES + 1)
        )
        with self._database.snapshot() as connection:
            seen = connection.execute(behind, {"of_job": job_id}).all()
            fitting = [row for row in seen[:SEARCHED_FAILURES] if row.error_code == code]
            shown = fitting[:limit]
            full = (
                sa.select(
                    _row.row_index,
                    request.c.line,
                    request.c.custom_id,
                    _row.error_code,
                    _row.error_message,
                    _row.error_param,
                )
                .join(request, request.c.id == _row.request_id)
                .where(
                    _row.request_id.in_([row.request_id for row in shown]),
                    InPartOf(_row.request_id, job_id),
                    InPartOf(request.c.id, job_id),
                )
                .order_by(_row.row_index)
            )
            rows = [FailedRow(*row) for row in connection.execute(full)] if shown else []
        if len(fitting) > limit:
            return rows, shown[-1].row_index
        more = len(seen) > SEARCHED_FAILURES
        return rows, seen[SEARCHED_FAILURES - 1].row_index if more else None

"""Reads what reports of jobs are made of: rows of micro-batches, and failures; never results."""

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from nightjar.jobs.job_report import (
    FailureGroups,
    FailureReason,
    FailureSample,
    JobReport,
    ReportedMicroBatch,
)
from nightjar.jobs.records import Job
from nightjar.jobs.report_builder import ReportBuilder
from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.store.common import now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.job_rows import find_job
from nightjar.jobs.store.parts import InPartOf
from nightjar.jobs.store.tables import job, micro_batch, request, result
from nightjar.jobs.tallies import load_tally

MOST_FAILURES = 100_000  # that are grouped
MOST_REASONS = 50
SAMPLES = 3
_PAGE = 1_000
_mb = micro_batch.c
_COLUMNS = [_mb[name] for name in ReportedMicroBatch.__slots__]
_STATES = tuple(MicroBatchState)
# One state after the other: so both databases walk an index, and no page has to be sorted.
BEHIND = (
    sa.select(_mb.id, *_COLUMNS)
    .where(
        _mb.state == sa.bindparam("of_state", type_=_mb.state.type),
        _mb.job_id == sa.bindparam("of_job"),
        _mb.id > sa.bindparam("behind"),
    )
    .order_by(_mb.id)
    .limit(_PAGE)
)
FAILED = (
    sa.select(result.c.row_index, result.c.request_id, result.c.error_code)
    .where(
        result.c.job_id == sa.bindparam("of_job", type_=sa.Text),
        InPartOf(result.c.request_id, sa.bindparam("of_job", type_=sa.Text)),
        result.c.row_index > sa.bindparam("behind"),
        result.c.error_code.is_not(None),
    )
    .order_by(result.c.row_index)
    .limit(_PAGE)
)
_SAMPLES = (
    sa.select(
        result.c.error_code,
        request.c.line,
        request.c.custom_id,
        result.c.error_message,
        result.c.error_param,
    )
    .join(request, request.c.id == result.c.request_id)
    .where(result.c.request_id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(result.c.row_index)
)
_RETRIED = sa.select(job.c.taken_back).where(job.c.id == sa.bindparam("of_job"))


class Reports:
    """Makes reports of jobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of_job(self, job_id: str, most_micro_batches: int | None = None) -> JobReport:
        """The report of a job as it stands.

        `most_micro_batches` bounds how many are read; the report says if there are more. Raises
        UnknownJobError.
        """
        with self._database.reading() as connection:
            found: Job = find_job(connection, job_id)
            retried = connection.scalar(_RETRIED, {"of_job": job_id}) or 0
        builder = ReportBuilder(found, now(), retried)
        for number, row in enumerate(self._micro_batches(job_id)):
            if number == most_micro_batches:
                return builder.built(self._failures(job_id), complete=False)
            builder.add(row)
        return builder.built(self._failures(job_id), complete=True)

    def _micro_batches(self, job_id: str) -> Iterator[ReportedMicroBatch]:
        for state in _STATES:
            behind = 0
            while True:
                key = {"of_state": state, "of_job": job_id, "behind": behind}
                with self._database.reading() as connection:
                    rows = connection.execute(BEHIND, key).all()
                for row in rows:
                    yield _reported(row)
                if len(rows) < _PAGE:
                    break
                behind = rows[-1].id

    def _failures(self, job_id: str) -> FailureGroups:
        """Failures by reason: the first MOST_FAILURES of the job's rows."""
        reasons: dict[str, FailureReason] = {}
        chosen: list[int] = []
        counted, behind, whole = 0, -1, True
        with self._database.reading() as connection:
            while True:
                rows = connection.execute(FAILED, {"of_job": job_id, "behind": behind}).all()
                for row in rows:
                    code = row.error_code
                    if code not in reasons and len(reasons) >= MOST_REASONS:
                        code = "other"
                    reason = reasons.setdefault(code, FailureReason(code))
                    reason.count += 1
                    if reason.count <= SAMPLES and code != "other":
                        chosen.append(row.request_id)
                counted += len(rows)
                if len(rows) < _PAGE:
                    break
                if counted >= MOST_FAILURES:
                    whole = False
                    break
                behind = rows[-1].row_index
            _add_samples(connection, reasons, chosen)
        ordered = sorted(reasons.values(), key=lambda reason: (-reason.count, reason.code))
        return FailureGroups(ordered, counted, whole)


def _reported(row: Row[Any]) -> ReportedMicroBatch:
    values = dict(row._mapping)
    del values["id"]
    return ReportedMicroBatch(**{**values, "tally": load_tally(values["tally"])})


def _add_samples(
    connection: Connection, reasons: dict[str, FailureReason], request_ids: list[int]
) -> None:
    if not request_ids:
        return
    rows: Any = connection.execute(_SAMPLES, {"ids": request_ids})
    for code, *of_row in rows:
        if code in reasons:
            reasons[code].samples.append(FailureSample(*of_row))

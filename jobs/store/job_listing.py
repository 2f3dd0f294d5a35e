"""Lists the jobs of a tenant for people: by state, by model, by a text, in pages.

No page reads all jobs. States are read from an index in the order of the ids. A text or a model is
searched in a bounded number of jobs; the next page goes on behind them.
"""

from typing import Any

import sqlalchemy as sa

from nightjar.jobs.overview_records import JobFilter, ListedJobs
from nightjar.jobs.records import Job
from nightjar.jobs.states import JobState
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.job_rows import JOB_COLUMNS, job_record
from nightjar.jobs.store.tables import LISTED, job

SEARCHED_JOBS = 2_000
_row = job.c
_ID_AND_MATCH = ("id", "fits")
_UNFINISHED = (JobState.RUNNING, JobState.CANCELLING, JobState.QUEUED, JobState.PAUSED)
_SOME = (
    sa.select(*JOB_COLUMNS)
    .where(_row.state == sa.bindparam("in_state", type_=_row.state.type), LISTED)
    .limit(sa.bindparam("searched", type_=sa.Integer))
    .subquery()
)
_NEWEST_OF_THEM = (
    sa.select(_SOME).order_by(_SOME.c.id.desc()).limit(sa.bindparam("most", type_=sa.Integer))
)


class JobListing:
    """Pages of jobs that fit a filter."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def page(self, wanted: JobFilter, *, after: str | None, limit: int) -> ListedJobs:
        """Up to `limit` jobs behind the id `after`, newest first.

        With a model or a text at most SEARCHED_JOBS jobs are looked at; there may be more behind
        `next_after`, also if the page is empty.
        """
        searches = bool(wanted.model or wanted.text)
        most = SEARCHED_JOBS if searches else limit
        with self._database.snapshot() as connection:
            seen = connection.execute(_window(wanted, after, most + 1)).all()
            fitting = [row.id for row in seen[:most] if row.fits][: limit + 1]
            shown = fitting[:limit]
            found = connection.execute(sa.select(*JOB_COLUMNS).where(_row.id.in_(shown))).all()
        if len(fitting) > limit:
            next_after = shown[-1]
        else:
            next_after = seen[most - 1].id if len(seen) > most else None
        jobs = sorted((job_record(row) for row in found), key=lambda one: one.id, reverse=True)
        return ListedJobs(jobs, next_after, min(len(seen), most) if searches else None)

    def unfinished(self, most: int) -> list[Job]:
        """Open jobs of all tenants, at most `most`: those that run first, then the newest.

        Of each state at most SEARCHED_JOBS jobs are looked at.
        """
        found: list[Job] = []
        with self._database.snapshot() as connection:
            for state in _UNFINISHED:
                bounds = {"searched": SEARCHED_JOBS, "most": most - len(found)}
                rows = connection.execute(_NEWEST_OF_THEM, {"in_state": state, **bounds})
                found += [job_record(row) for row in rows]
        return found


def _window(wanted: JobFilter, after: str | None, most: int) -> sa.Select[Any]:
    """The ids behind `after`, and whether each fits; of each state by itself, as indexed."""
    fits = _fits(wanted).label("fits")
    parts: list[sa.Select[Any]] = [
        _newest(wanted.tenant, state, after, most, fits) for state in wanted.states or (None,)
    ]
    if len(parts) == 1:
        return parts[0]
    # Subqueries: SQLite takes no LIMIT in a part of a union.
    whole = sa.union_all(*(sa.select(part.subquery()) for part in parts)).subquery()
    return (
        sa.select(*(whole.c[name] for name in _ID_AND_MATCH))
        .order_by(whole.c.id.desc())
        .limit(most)
    )


def _newest(
    tenant: str,
    state: JobState | None,
    after: str | None,
    most: int,
    fits: sa.Label[bool],
) -> sa.Select[Any]:
    statement = (
        sa.select(_row.id, fits)
        .where(_row.tenant == tenant, LISTED)
        .order_by(_row.id.desc())
        .limit(most)
    )
    if state is not None:
        statement = statement.where(_row.state == state)
    return statement if after is None else statement.where(_row.id < after)


def _fits(wanted: JobFilter) -> sa.ColumnElement[bool]:
    conditions: list[sa.ColumnElement[bool]] = [sa.true()]
    if wanted.model:
        conditions.append(_row.model == wanted.model)
    if wanted.text:
        places = (_row.id, _row.model, _row.metadata)
        conditions.append(
            sa.or_(*(place.icontains(wanted.text, autoescape=True) for place in places))
        )
    return sa.and_(*conditions)

"""Quotas of tenants: tokens a day, rows that wait, bytes of files.

They are checked where a job lands (`jobs/store/submission.py`) and where it is retried
(`jobs/store/retrying.py`), so that no way into the store goes around them. Tokens are counted by
the jobs themselves as results land: each job has the tokens of its newest day (`_COUNT` in
`jobs/store/outcomes.py`). So nothing is added to the landing of results but two columns of a row
that it writes anyway.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.errors import QuotaError
from nightjar.jobs.states import JobState
from nightjar.jobs.store.account_tables import tenant
from nightjar.jobs.store.common import OPEN_JOBS, AnyRow, now, today
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.tables import job

USED_UP = "insufficient_quota"
TOO_MANY_WAIT = "rows_waiting_exceeded"
ROWS_RETRY_S = 60.0  # rows end all the time: it is worth a try after so long
# A day's tokens are summed over all jobs that had some. The sum is kept for a while: at least
# KEPT_S, and so long that all sums together take at most 1/KEPT_TIMES of the time.
KEPT_S = 2.0
KEPT_TIMES = 50
_MOST_KEPT = 1_000  # tenants
# For messages: what adds rows, what to do if it is too large, and what to do later.
_JOB = "a job", "split it", "send the job"
_RETRY = "a retry", "submit the failed rows in smaller jobs", "retry it"

_LIMITS = sa.select(tenant.c.tokens_a_day, tenant.c.rows_waiting, tenant.c.bytes_stored).where(
    tenant.c.name == sa.bindparam("tenant")
)
_TOKENS = sa.select(sa.func.coalesce(sa.func.sum(job.c.day_tokens), 0)).where(
    job.c.tenant == sa.bindparam("tenant"), job.c.tokens_day == sa.bindparam("today")
)
_ended = job.c.completed + job.c.failed + job.c.cancelled
_WAITING = sa.select(sa.func.coalesce(sa.func.sum(job.c.total - _ended), 0)).where(
    job.c.tenant == sa.bindparam("tenant"),
    job.c.state.in_([*OPEN_JOBS, JobState.CANCELLING]),
)


class Quotas:
    """Checks what tenants may still use; a tenant without limits costs one look-up by its name."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # tenant -> (day, tokens, kept until)
        self._kept: dict[str, tuple[int, int, float]] = {}

    def tokens_today(self, name: str) -> int:
        """Prompt and completion tokens of the results that landed today (UTC)."""
        with self._database.reading() as connection:
            return _tokens(connection, name)

    def rows_waiting(self, name: str) -> int:
        """Rows of the tenant that have no outcome yet."""
        with self._database.reading() as connection:
            return _waiting(connection, name)

    def check_new_job(self, connection: Connection, name: str, rows: int) -> None:
        """Raise QuotaError unless the tenant may add a job of at least so many rows now.

        Without rows, for an open job, only the tokens of the day count.
        """
        limits = connection.execute(_LIMITS, {"tenant": name}).one_or_none()
        if limits is None:
            return
        if limits.tokens_a_day is not None:
            self._check_tokens(connection, name, limits.tokens_a_day)
        if limits.rows_waiting is not None and rows:
            _check_rows(connection, name, limits, rows)

    def check_retry(self, connection: Connection, name: str, failures: Callable[[], int]) -> None:
        """Raise QuotaError unless the tenant may have its failed rows computed again now.

        `failures` counts them; asked only of a tenant that has a limit. No rows need no quota.
        """
        limits = connection.execute(_LIMITS, {"tenant": name}).one_or_none()
        if limits is None or (limits.tokens_a_day is None and limits.rows_waiting is None):
            return
        rows = failures()
        if not rows:
            return
        if limits.tokens_a_day is not None:
            self._check_tokens(connection, name, limits.tokens_a_day)
        if limits.rows_waiting is not None:
            _check_rows(connection, name, limits, rows, _RETRY)

    def may_store(self, name: str, more: int, stored: Callable[[str], int]) -> bool:
        """Whether the tenant may store so many bytes more.

        `stored` gives the bytes that it stores already; asked only of a tenant that has a limit.
        """
        with self._database.reading() as connection:
            limits = connection.execute(_LIMITS, {"tenant": name}).one_or_none()
        most = None if limits is None else limits.bytes_stored
        return most is None or stored(name) + more <= most

    def _check_tokens(self, connection: Connection, name: str, most: int) -> None:
        used = self._kept_tokens(connection, name)
        if used >= most:
            raise QuotaError(
                USED_UP,
                f"this tenant has used {used} of {most} tokens of today (UTC); new work is taken "
                "again after midnight",
                _until_midnight_s(now()),
            )

    def _kept_tokens(self, connection: Connection, name: str) -> int:
        began_at, day = time.monotonic(), today()
        known = self._kept.get(name)
        if known is not None and known[0] == day and began_at < known[2]:
            return known[1]
        used = _tokens(connection, name)
        ended_at = time.monotonic()
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        kept_s = max(KEPT_S, KEPT_TIMES * (ended_at - began_at))
        self._kept[name] = (day, used, ended_at + kept_s)
        return used


def _check_rows(
    connection: Connection, name: str, limits: AnyRow, rows: int, words: tuple[str, str, str] = _JOB
) -> None:
    what, remedy, again = words
    most, waiting = limits.rows_waiting, _waiting(connection, name)
    if rows > most:
        raise QuotaError(
            TOO_MANY_WAIT,
            f"{what} of {rows} rows never fits: this tenant may have {most} rows waiting; {remedy}",
        )
    if waiting + rows > most:
        raise QuotaError(
            TOO_MANY_WAIT,
            f"{waiting} rows of this tenant wait already, and it may have {most}; {again} "
            "again when some have ended",
            ROWS_RETRY_S,
        )


def _tokens(connection: Connection, name: str) -> int:
    return int(connection.scalar(_TOKENS, {"tenant": name, "today": today()}) or 0)


def _waiting(connection: Connection, name: str) -> int:
    return int(connection.scalar(_WAITING, {"tenant": name}) or 0)


def _until_midnight_s(moment: datetime) -> float:
    """Seconds until the next day of UTC begins."""
    tomorrow = datetime.combine(moment.date() + timedelta(days=1), datetime.min.time(), UTC)
    return (tomorrow - moment).total_seconds()

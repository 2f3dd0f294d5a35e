"""Results of a job, in pages that are bounded in rows and bytes.

In row order a page of a running job ends before the first row without an outcome. In the order of
landing a client that asks on gets each result once, whatever lands meanwhile.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.batch_records import RawResult, ResultLengths
from nightjar.jobs.errors import PurgedJobError, UnknownJobError
from nightjar.jobs.records import ResultPage, ResultRecord
from nightjar.jobs.store.answer_packs import AnswerBodies
from nightjar.jobs.store.common import AnyRow
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.landings import ids_from, is_numbered, number_some
from nightjar.jobs.store.parts import InPartOf
from nightjar.jobs.store.result_lengths import lengths_after
from nightjar.jobs.store.result_rows import (
    Outcome,
    RawRows,
    fetch,
    fetch_raw,
    fitting,
    raw_page,
    sizes_after,
    sizes_of,
)
from nightjar.jobs.store.tables import job, result

Order = Literal["row", "landed"]
# A page is in memory whole, and an answer may be megabytes: a ranking of 10,000 documents is.
PAGE_BYTES = 4 * 1024 * 1024
# A page of successes or failures alone searches so many rows.
SCANNED_ROWS = 10_000
ROWS_IN_MEMORY = 200
_PURGED_AT = sa.select(job.c.purged_at).where(job.c.id == sa.bindparam("job"))


class Results:
    """Reads what has landed: page by page, or all of it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def page(
        self,
        job_id: str,
        *,
        order: Order = "row",
        after: int = -1,
        limit: int = 1_000,
        outcome: Outcome = "all",
        max_bytes: int = PAGE_BYTES,
    ) -> ResultPage:
        """A page of landed outcomes behind `after`, a row index or a position in the landing order.

        A page holds at least one outcome, if there is one, however large it is. Raises
        UnknownJobError and PurgedJobError.
        """
        if order == "landed":
            self._number(job_id)
            return self._page_as_landed(job_id, after, limit, outcome, max_bytes)
        return self._page_by_row(job_id, after, limit, outcome, max_bytes)

    def read(
        self,
        job_id: str,
        *,
        after_index: int = -1,
        limit: int = 1_000,
        outcome: Outcome = "all",
        max_bytes: int = PAGE_BYTES,
    ) -> list[ResultRecord]:
        """Up to `limit` landed outcomes whose row index lies above `after_index`, in row order.

        Fewer, but at least one, where more would exceed `max_bytes`. "failed" includes cancelled
        rows. While the job runs, a row below `after_index` can still land: then use `page`. Raises
        PurgedJobError.
        """
        return self._read(job_id, after_index, limit, outcome, max_bytes, AnswerBodies())

    def _read(
        self,
        job_id: str,
        after: int,
        limit: int,
        outcome: Outcome,
        max_bytes: int,
        bodies_of: AnswerBodies,
    ) -> list[ResultRecord]:
        with self._database.snapshot() as connection:
            _check_there(connection, job_id)
            sizes = sizes_after(connection, self._database, job_id, after, limit, outcome)
            taken = fitting(sizes, limit, max_bytes)
            ids = [row.request_id for row in taken]
            return fetch(connection, self._database, ids, bodies_of)

    def iterate(
        self, job_id: str, *, outcome: Outcome = "all", page_size: int = ROWS_IN_MEMORY
    ) -> Iterator[ResultRecord]:
        """Every landed outcome in row order, a page in memory at a time.

        Raises PurgedJobError, also in the middle: nobody takes a part for the whole.
        """
        after, bodies_of = -1, AnswerBodies()
        while page := self._read(job_id, after, page_size, outcome, PAGE_BYTES, bodies_of):
            yield from page
            after = page[-1].index

    def iterate_raw(
        self,
        job_id: str,
        *,
        outcome: Outcome = "all",
        after: int = -1,
        last: int | None = None,
        page_size: int = ROWS_IN_MEMORY,
    ) -> Iterator[RawResult]:
        """The same with bodies as they are stored, for files: parsing takes most of the time.

        Of the rows behind `after`, up to `last`; a page of `page_size` rows is in memory at a time.
        """
        bodies_of = AnswerBodies()
        while True:
            with self._database.snapshot() as connection:
                _check_there(connection, job_id)
                within = RawRows(job_id, after, last, page_size, outcome)
                page, after = raw_page(connection, self._database, within, PAGE_BYTES, bodies_of)
            if not page:
                return
            yield from page

    def lengths(self, job_id: str, after_index: int, limit: int) -> ResultLengths | None:
        """What tells the lengths of up to `limit` lines behind a row; None without any."""
        with self._database.reading() as connection:
            return lengths_after(connection, self._database, job_id, after_index, limit)

    def raw(self, request_ids: Sequence[int]) -> list[RawResult]:
        """The outcomes of these requests; all of them are in memory."""
        with self._database.reading() as connection:
            return fetch_raw(connection, self._database, request_ids)

    def _page_by_row(
        self, job_id: str, after: int, limit: int, outcome: Outcome, max_bytes: int
    ) -> ResultPage:
        with self._database.snapshot() as connection:
            standing = _standing(connection, job_id)
            edge, searched = None, 0
            if standing.finished_at is None:
                searched = limit + 1 if outcome == "all" else SCANNED_ROWS
                edge = _complete_to(connection, job_id, after, searched)
            sizes = sizes_after(connection, self._database, job_id, after, limit, outcome, edge)
            taken = fitting(sizes, limit, max_bytes)
            records = fetch(connection, self._database, [row.request_id for row in taken])
        if len(taken) < len(sizes):
            return ResultPage(records, taken[-1].row_index, has_more=True, complete=False)
        if edge is None:
            last = taken[-1].row_index if taken else after
            return ResultPage(records, last, has_more=False, complete=True)
        if edge == after + searched:  # no gap so far: the next page goes on
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
            sizes = sizes_of(connection, self._database, [id_ for id_, _ in entries], outcome)
            ids: list[int] = []
            place, bytes_ = after, 0
            for id_, token in entries:
                # No size: another outcome, or a retry took it back and it landed again elsewhere.
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
        """Add results that processes of the version before have landed to the landing order."""
        with self._database.reading() as connection:
            if is_numbered(connection, job_id):
                return
        after: int | None = -1
        while after is not None:
            step = partial(number_some, job_id=job_id, after=after)
            after = self._database.write(step)


def _complete_to(connection: Connection, job_id: str, after: int, most: int) -> int:
    """The last of the `most` rows behind `after` up to which no outcome is missing."""
    row = result.c
    behind = (
        sa.select(row.row_index)
        .where(row.job_id == job_id, InPartOf(row.request_id, job_id), row.row_index > after)
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
    columns = (job.c.total, job.c.landed, job.c.finished_at, job.c.purged_at)
    found = connection.execute(sa.select(*columns).where(job.c.id == job_id)).one_or_none()
    if found is None:
        raise UnknownJobError(job_id)
    if found.purged_at is not None:
        raise PurgedJobError(job_id, found.purged_at)
    return found


def _check_there(connection: Connection, job_id: str) -> None:
    """Raise PurgedJobError for a job whose rows are gone, or are about to go."""
    purged_at = connection.scalar(_PURGED_AT, {"job": job_id})
    if purged_at is not None:
        raise PurgedJobError(job_id, purged_at)

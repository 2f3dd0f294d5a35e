"""Answers and scores that are kept, so that later jobs need not compute them again.

They may be in a database of their own. To lose any of them costs computing, nothing else.
"""

import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.records import CachedAnswer, CachedScore
from nightjar.jobs.store.bulk import BulkInsert, driver_value
from nightjar.jobs.store.cache_tables import cached_result, cached_score
from nightjar.jobs.store.common import TOKEN_COUNTS, now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.json_text import dump_json, load_json

# A larger one would push many others out of the cache.
MOST_BODY_CHARACTERS = 1 << 20
ROWS_PER_STEP = 1_000

_COLUMNS = ("key", "body", *TOKEN_COUNTS, "finish_reason", "created_at")
_ANSWER = [cached_result.c[name] for name in CachedAnswer.__slots__]
_SCORE = [cached_score.c[name] for name in CachedScore.__slots__]


class AnswerCache:
    """Answers and scores that planners and workers look up, and that workers keep."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._insert_answers = BulkInsert(database, cached_result, _COLUMNS, skips_known=True)
        names = (*CachedScore.__slots__, "created_at")
        self._insert_scores = BulkInsert(database, cached_score, names, skips_known=True)

    def find_answers(self, keys: Sequence[str], youngest_s: float) -> dict[str, CachedAnswer]:
        """The answers with these keys that are at most `youngest_s` old, by the wall clock."""
        rows = self._found(cached_result, _ANSWER, keys, youngest_s)
        return {key: CachedAnswer(key, load_json(body), *rest) for key, body, *rest in rows}

    def find_scores(self, keys: Sequence[str], youngest_s: float) -> dict[str, CachedScore]:
        """The scores with these keys that are at most `youngest_s` old, by the wall clock."""
        rows = self._found(cached_score, _SCORE, keys, youngest_s)
        return {row[0]: CachedScore(*row) for row in rows}

    def keep_answers(self, answers: Sequence[CachedAnswer]) -> int:
        """Keep answers whose keys are new; returns how many these were."""
        moment = driver_value(self._database, cached_result.c.created_at, now())
        return self._keep(self._insert_answers, list(_rows(answers, moment)))

    def keep_scores(self, scores: Sequence[CachedScore]) -> int:
        """Keep scores whose keys are new; returns how many these were."""
        moment = driver_value(self._database, cached_score.c.created_at, now())
        rows = [(item.key, item.mean_nll, item.token_count, moment) for item in scores]
        return self._keep(self._insert_scores, rows)

    def drop_old(self, most_answers: int, most_scores: int, oldest_s: float) -> int:
        """Drop the oldest, until no more than so many are there and none is older than `oldest_s`.

        Returns how many were dropped.
        """
        bounds = ((cached_result, most_answers), (cached_score, most_scores))
        return sum(
            self._drop(table, which)
            for table, most in bounds
            for which in _too_many(table, most, oldest_s)
        )

    def _found(
        self,
        table: sa.Table,
        columns: Sequence[sa.Column[Any]],
        keys: Sequence[str],
        youngest_s: float,
    ) -> list[tuple[Any, ...]]:
        is_sqlite = self._database.is_sqlite
        listed = json.dumps(keys) if is_sqlite else keys
        since = now() - timedelta(seconds=youngest_s)
        statement = sa.select(*columns).where(
            _is_listed(table, is_sqlite=is_sqlite), table.c.created_at > since
        )
        with self._database.reading() as connection:
            return [tuple(row) for row in connection.execute(statement, {"keys": listed})]

    def _keep(self, insert: BulkInsert, rows: list[tuple[Any, ...]]) -> int:
        # Sorted, so that two workers that keep the same answers never wait for each other.
        rows.sort(key=lambda row: str(row[0]))

        def work(connection: Connection) -> int:
            return insert.run(connection, rows)

        # Not durable: what a power cut undoes is computed again.
        return self._database.write(work, durable=False) if rows else 0

    def _drop(self, table: sa.Table, which: sa.Select[int]) -> int:
        statement = sa.delete(table).where(table.c.id.in_(which))
        dropped = 0
        while step := self._database.write(
            lambda connection: connection.execute(statement).rowcount, durable=False
        ):
            dropped += step
        return dropped


def _too_many(table: sa.Table, most_rows: int, oldest_s: float) -> Iterator[sa.Select[int]]:
    """Two selections of ids: the next rows that are too old, the next that are too many."""
    row, before = table.c, now() - timedelta(seconds=oldest_s)
    oldest = sa.select(row.id, row.created_at).order_by(row.id).limit(ROWS_PER_STEP).subquery()
    yield sa.select(oldest.c.id).where(oldest.c.created_at <= before)
    last_over = sa.select(row.id).order_by(row.id.desc()).offset(most_rows).limit(1)
    yield sa.select(oldest.c.id).where(oldest.c.id <= last_over.scalar_subquery())


def _rows(answers: Sequence[CachedAnswer], moment: object) -> Iterator[tuple[object, ...]]:
    for item in answers:
        body = dump_json(item.body)
        if len(body) <= MOST_BODY_CHARACTERS:
            counts = [getattr(item, name) for name in TOKEN_COUNTS]
            yield (item.key, body, *counts, item.finish_reason, moment)


def _is_listed(table: sa.Table, *, is_sqlite: bool) -> sa.ColumnElement[bool]:
    """Whether the key is in the array `keys`, on SQLite one in JSON."""
    if is_sqlite:
        listed = sa.func.json_each(sa.bindparam("keys", type_=sa.Text)).table_valued("value")
        return table.c.key.in_(sa.select(listed.c.value))
    return table.c.key == sa.any_(sa.bindparam("keys", type_=sa.ARRAY(sa.Text)))

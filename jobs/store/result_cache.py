"""Answers that are kept, so that equal requests of later jobs need not be computed.

They may stand in a database of their own. Losing any of them costs computing, nothing else.
"""

import json
from collections.abc import Iterator, Sequence
from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.records import CachedAnswer
from nightjar.jobs.store.base import StorePart, dump_json, load_json, now
from nightjar.jobs.store.bulk import BulkInsert, driver_value
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.tables import cached_result

# One that is larger would push many others out; computing it again is the smaller evil.
MOST_BODY_CHARACTERS = 1 << 20
ROWS_PER_STEP = 1_000

_row = cached_result.c
_COUNTS = ("prompt_tokens", "completion_tokens", "requested_tokens", "saved_tokens")
_COLUMNS = ("key", "body", *_COUNTS, "finish_reason", "created_at")
_ANSWER = [_row[name] for name in CachedAnswer.__slots__]


class CacheStore(StorePart):
    """What planners look up and workers leave."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._insert_answers = BulkInsert(database, cached_result, _COLUMNS)
        self._is_asked = _is_listed(database)

    def cached(self, keys: Sequence[str], youngest_s: float) -> dict[str, CachedAnswer]:
        """The answers of these keys that are at most so old, by the wall clock."""
        listed = json.dumps(keys) if self._database.is_sqlite else keys
        since = now() - timedelta(seconds=youngest_s)
        statement = sa.select(*_ANSWER).where(self._is_asked, _row.created_at > since)
        with self._database.reading() as connection:
            rows = connection.execute(statement, {"keys": listed}).all()
        return {key: CachedAnswer(key, load_json(body), *rest) for key, body, *rest in rows}

    def keep(self, answers: Sequence[CachedAnswer]) -> int:
        """Keep answers; of a key that is there the older one stays. Returns how many were new."""
        moment = driver_value(self._database, _row.created_at, now())
        rows = list(_rows(answers, moment))
        # In one order, so that two workers that keep the same never wait in a circle.
        rows.sort(key=lambda row: str(row[0]))

        def work(connection: Connection) -> int:
            return self._insert_answers.run(connection, rows)

        # Not durable: what a power cut takes is computed again.
        return self._database.write(work, durable=False) if rows else 0

    def drop_old(self, most_rows: int, oldest_s: float) -> int:
        """Let the oldest go until no more than `most_rows` are there, none older than `oldest_s`.

        Returns how many went.
        """
        before = now() - timedelta(seconds=oldest_s)
        oldest = (
            sa.select(_row.id, _row.created_at).order_by(_row.id).limit(ROWS_PER_STEP).subquery()
        )
        outdated = sa.select(oldest.c.id).where(oldest.c.created_at <= before)
        last_over = sa.select(_row.id).order_by(_row.id.desc()).offset(most_rows).limit(1)
        surplus = sa.select(oldest.c.id).where(oldest.c.id <= last_over.scalar_subquery())
        return sum(self._drop(which) for which in (outdated, surplus))

    def _drop(self, which: sa.Select[int]) -> int:
        statement = sa.delete(cached_result).where(_row.id.in_(which))
        dropped = 0
        while step := self._database.write(
            lambda connection: connection.execute(statement).rowcount, durable=False
        ):
            dropped += step
        return dropped


def _rows(answers: Sequence[CachedAnswer], moment: object) -> Iterator[tuple[object, ...]]:
    for item in answers:
        body = dump_json(item.body)
        if len(body) <= MOST_BODY_CHARACTERS:
            counts = [getattr(item, name) for name in _COUNTS]
            yield (item.key, body, *counts, item.finish_reason, moment)


def _is_listed(database: Database) -> sa.ColumnElement[bool]:
    """Whether the key is in the array `keys`, on SQLite one in JSON."""
    if database.is_sqlite:
        listed = sa.func.json_each(sa.bindparam("keys", type_=sa.Text)).table_valued("value")
        return _row.key.in_(sa.select(listed.c.value))
    return _row.key == sa.any_(sa.bindparam("keys", type_=sa.ARRAY(sa.Text)))

"""Figures of one job for people: stages, speed, lengths. Each reads a bounded number of rows.

The order of landing has a position for each outcome. So the store finds when a position was reached
with two look-ups by key, and a curve of a million rows takes as many rows as of a thousand. Lengths
come from a sample of rows: one at random of each stretch of equally many.
"""

import json
import random
from collections.abc import Collection, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.overview_records import (
    LandedLengths,
    LandedPoint,
    LengthSample,
    Rates,
    StageCount,
    Stages,
)
from nightjar.jobs.records import Job
from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.store.common import now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.landings import unpack_ids
from nightjar.jobs.store.parts import InPartOf
from nightjar.jobs.store.tables import job, landing, micro_batch, result

COUNTED_MICRO_BATCHES = 4_000  # of each state
CURVE_POINTS = 60
SAMPLED_ROWS = 1_500
# The speed is that of the latest rows: a twentieth of what has landed, at least so many.
LATEST_ROWS = 256
_STAGES = (
    MicroBatchState.READY,
    MicroBatchState.DISPATCHED,
    MicroBatchState.LEASED,
    MicroBatchState.DONE,
)
_mb = micro_batch.c


class JobFigures:
    """How the work of a job is spread over stages, time and lengths."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._stages = _stages()

    def stages(self, job_id: str) -> Stages:
        """The micro-batches of a job by state, kind and bucket."""
        with self._database.reading() as connection:
            rows = connection.execute(self._stages, {"of_job": job_id}).all()
        counts = [StageCount(*row) for row in rows]
        counted = [
            sum(one.micro_batches for one in counts if one.state is state) for state in _STAGES
        ]
        return Stages(counts, any(number >= COUNTED_MICRO_BATCHES for number in counted))

    def landed(self, job_id: str, points: int = CURVE_POINTS) -> list[LandedPoint]:
        """When the outcomes landed: up to so many points, the first and the last among them.

        Moments are by the clocks of the workers; they never fall from point to point.
        """
        with self._database.reading() as connection:
            count = connection.scalar(sa.select(job.c.landed).where(job.c.id == job_id)) or 0
            places = sorted(
                {(count - 1) * n // (points - 1) for n in range(points)} if count else ()
            )
            found = self._moments(connection, job_id, places)
        curve: list[LandedPoint] = []
        for place in places:
            if (moment := found.get(place)) is not None:
                latest = max(moment, curve[-1].at) if curve else moment
                curve.append(LandedPoint(place, latest))
        return curve

    def rates(self, jobs: Collection[Job]) -> Rates:
        """Rows a second that have landed lately, of those jobs that run and have landed rows."""
        found: dict[str, float] = {}
        moment = now()
        with self._database.reading() as connection:
            for one in jobs:
                if one.is_over or one.started_at is None or not one.ended:
                    continue
                latest = min(one.ended, max(LATEST_ROWS, one.ended // 20))
                place = one.ended - latest
                begun = self._moments(connection, one.id, [place]).get(place)
                begun = one.started_at if begun is None or place == 0 else begun
                elapsed_s = (moment - begun).total_seconds()
                if elapsed_s > 0:
                    found[one.id] = latest / elapsed_s
        return found

    def lengths(self, job_id: str, total: int) -> LengthSample:
        """Prompt, requested and generated tokens of landed successes of a job of `total` rows.

        The same rows each time, so that a chart does not tremble.
        """
        places = sampled_places(job_id, total)
        listed, row = self._listed(places), result.c
        columns = (row.prompt_tokens, row.requested_tokens, row.completion_tokens)
        wanted = (
            row.job_id == job_id,
            InPartOf(row.request_id, job_id),
            row.row_index == listed.c.value,
            row.error_code.is_(None),
        )
        if self._database.is_sqlite:
            statement = sa.select(*columns).select_from(listed).join(result, sa.and_(*wanted))
        else:
            # The limit keeps PostgreSQL from reading the table once instead.
            one = sa.select(*columns).where(*wanted).limit(1).lateral()
            statement = sa.select(*one.c).select_from(listed).join(one, sa.true())
        with self._database.reading() as connection:
            rows = [LandedLengths(*found) for found in connection.execute(statement)]
        return LengthSample(rows, len(places), whole=len(places) == total)

    def _moments(
        self, connection: Connection, job_id: str, places: Sequence[int]
    ) -> dict[int, datetime]:
        """When each position was reached; what has moved in the order since is left out."""
        if not places:
            return {}
        listed = self._listed(places)
        held = (
            sa.select(landing.c.request_ids)
            .where(landing.c.job_id == job_id, landing.c.first <= listed.c.value)
            .order_by(landing.c.first.desc())
            .limit(1)
            .scalar_subquery()
        )
        of_place = {
            place: unpack_ids(packed[:8])[0]
            for place, packed in connection.execute(sa.select(listed.c.value, held))
            if packed
        }
        moments = dict(
            connection.execute(
                sa.select(result.c.request_id, result.c.created_at).where(
                    result.c.request_id.in_(sorted(set(of_place.values()))),
                    InPartOf(result.c.request_id, job_id),
                )
            ).all()
        )
        return {place: moments[id_] for place, id_ in of_place.items() if id_ in moments}

    def _listed(self, numbers: Sequence[int]) -> sa.TableValuedAlias:
        """The numbers as the column `value` of a table."""
        value = sa.column("value", sa.BigInteger)
        if self._database.is_sqlite:
            return sa.func.json_each(json.dumps(numbers)).table_valued(value, name="places")
        array = sa.literal(list(numbers), sa.ARRAY(sa.BigInteger))
        return sa.func.unnest(array).table_valued(value, name="places").render_derived()


def sampled_places(job_id: str, total: int) -> list[int]:
    """Up to SAMPLED_ROWS row indexes: one at random of each stretch."""
    if total <= SAMPLED_ROWS:
        return list(range(total))
    chosen = random.Random(job_id)
    edges = [total * n // SAMPLED_ROWS for n in range(SAMPLED_ROWS + 1)]
    return [chosen.randrange(first, last) for first, last in pairwise(edges)]


def _stages() -> sa.CompoundSelect[Any]:
    """Of each state the newest micro-batches, grouped: each part reads the index of states."""
    parts = []
    for state in _STAGES:
        newest = (
            sa.select(_mb.kind, _mb.bucket, _mb.size, _mb.tokens)
            # As a literal, so that the database sees that it is one range of the index.
            .where(
                _mb.state == sa.literal_column(f"'{state}'"), _mb.job_id == sa.bindparam("of_job")
            )
            .order_by(_mb.id.desc())
            .limit(COUNTED_MICRO_BATCHES)
            .subquery()
        )
        parts.append(
            sa.select(
                sa.literal_column(f"'{state}'", _mb.state.type).label("state"),
                newest.c.kind,
                newest.c.bucket,
                sa.func.count(),
                sa.func.sum(newest.c.size),
                sa.func.sum(newest.c.tokens, type_=sa.BigInteger),
            ).group_by(newest.c.kind, newest.c.bucket)
        )
    return sa.union_all(*parts)

"""The deployment for people: GPU workers and what they compute, queues and how long they wait."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.overview_records import HeldMicroBatch, QueueDepth, ServedView, WorkerView
from nightjar.jobs.states import MicroBatchState
from nightjar.jobs.store.common import now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.json_text import load_json
from nightjar.jobs.store.model_tables import model, worker_model
from nightjar.jobs.store.ready import models_with_ready
from nightjar.jobs.store.tables import READY_ALONE, job, micro_batch, worker

SHOWN_WORKERS = 200
SHOWN_HELD = 2_000
COUNTED_MICRO_BATCHES = 5_000  # of each model
LISTED_WITHIN = timedelta(days=1)
_mb = micro_batch.c


def _in_flight(state: MicroBatchState) -> sa.Select[Any]:
    # In the order of the index of states, so that a database does not read what is over instead.
    found = (
        sa.select(_mb.fingerprint, _mb.kind, _mb.bucket, _mb.size, _mb.tokens)
        .where(_mb.state == sa.literal_column(f"'{state}'"))
        .order_by(_mb.job_id, _mb.id)
        .limit(COUNTED_MICRO_BATCHES)
        .subquery()
    )
    return sa.select(
        found.c.fingerprint,
        found.c.kind,
        found.c.bucket,
        sa.literal_column(f"'{state}'", _mb.state.type).label("state"),
        sa.func.count(),
        sa.func.sum(found.c.size),
        sa.func.sum(found.c.tokens, type_=sa.BigInteger),
    ).group_by(found.c.fingerprint, found.c.kind, found.c.bucket)


_IN_FLIGHT = sa.union_all(
    _in_flight(MicroBatchState.DISPATCHED), _in_flight(MicroBatchState.LEASED)
)
_ready = (
    sa.select(_mb.kind, _mb.bucket, _mb.size, _mb.tokens, _mb.job_id)
    .where(_mb.fingerprint == sa.bindparam("of_model", type_=sa.String), READY_ALONE)
    .order_by(_mb.job_id, _mb.id)
    .limit(COUNTED_MICRO_BATCHES)
    .subquery()
)
_READY = sa.select(
    _ready.c.kind,
    _ready.c.bucket,
    sa.func.count(),
    sa.func.sum(_ready.c.size),
    sa.func.sum(_ready.c.tokens, type_=sa.BigInteger),
    sa.func.min(_ready.c.job_id),
).group_by(_ready.c.kind, _ready.c.bucket)
_HELD = (
    sa.select(
        _mb.owner, _mb.job_id, job.c.tenant, _mb.kind, _mb.bucket, _mb.size, _mb.tokens, _mb.live
    )
    .join(job, job.c.id == _mb.job_id)
    .where(_mb.state == MicroBatchState.LEASED)
    .order_by(_mb.job_id, _mb.id)
    .limit(SHOWN_HELD)
)


class DeploymentView:
    """What GPU workers do now, and what waits for them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def workers(self) -> list[WorkerView]:
        """GPU workers that served a model within a day, the latest sign of life first."""
        row = worker.c
        # Workers that have ended stay in their table for ever; those that serve a model are few.
        serving = sa.select(worker_model.c.owner).distinct().limit(SHOWN_WORKERS).subquery()
        seen = (
            sa.select(row.owner, row.seen_at, row.engine_s, row.load_s, row.status)
            .join_from(serving, worker, row.owner == serving.c.owner)
            .where(row.seen_at > now() - LISTED_WITHIN)
            .order_by(row.seen_at.desc(), row.owner)
        )
        with self._database.snapshot() as connection:
            found = connection.execute(seen).all()
            owners = [one.owner for one in found]
            served = _models_of(connection, owners)
            held: dict[str, list[HeldMicroBatch]] = defaultdict(list)
            for owner, *of_batch in connection.execute(_HELD):
                held[owner].append(HeldMicroBatch(*of_batch))
        return [
            WorkerView(
                one.owner,
                one.seen_at,
                one.engine_s,
                one.load_s,
                _models_said(one.status) or [ServedView(name) for name in served[one.owner]],
                held[one.owner],
            )
            for one in found
        ]

    def queues(self) -> list[QueueDepth]:
        """What waits and what is computed, by model, kind and bucket."""
        depths: dict[tuple[str, str, int], dict[str, Any]] = defaultdict(
            lambda: dict.fromkeys(("ready", "dispatched", "leased", "rows", "tokens"), 0)
        )
        with self._database.snapshot() as connection:
            for print_, kind, bucket, state, count, rows, tokens in connection.execute(_IN_FLIGHT):
                one = depths[print_, kind, bucket]
                one[state] += count
                one["rows"] += rows
                one["tokens"] += tokens
            firsts: dict[tuple[str, str, int], str] = {}
            truncated = set()
            for print_ in models_with_ready(connection):
                groups = connection.execute(_READY, {"of_model": print_}).all()
                if sum(group[2] for group in groups) >= COUNTED_MICRO_BATCHES:
                    truncated.add(print_)
                for kind, bucket, count, rows, tokens, first in groups:
                    one = depths[print_, kind, bucket]
                    one["ready"] += count
                    one["rows"] += rows
                    one["tokens"] += tokens
                    firsts[print_, kind, bucket] = first
            made = _creations(connection, set(firsts.values()))
            names = _names(connection)
        return [
            QueueDepth(
                model=names.get(key[0], key[0][:12] or "any"),
                kind=key[1],  # type: ignore[arg-type]  # of the column's type
                bucket=key[2],
                waiting=one["ready"],
                dispatched=one["dispatched"],
                computing=one["leased"],
                rows=one["rows"],
                tokens=one["tokens"],
                oldest_at=made.get(firsts.get(key, "")),
                truncated=key[0] in truncated,
            )
            for key, one in sorted(depths.items())
        ]


def _models_said(status: str | None) -> list[ServedView]:
    """The models in a worker's sign of life; a worker of an older version says less."""
    said = {} if status is None else load_json(status)
    names = [field.name for field in fields(ServedView)]
    return [
        ServedView(**{name: one[name] for name in names if one.get(name) is not None})
        for one in said.get("models", ())
        if "name" in one
    ]


def _models_of(connection: Connection, owners: list[str]) -> Mapping[str, list[str]]:
    served = worker_model.c
    statement = (
        sa.select(
            served.owner, sa.func.coalesce(model.c.name, sa.func.substr(served.fingerprint, 1, 12))
        )
        .outerjoin_from(worker_model, model, model.c.fingerprint == served.fingerprint)
        .where(served.owner.in_(owners))
        .order_by(served.owner, model.c.name)
    )
    found: dict[str, list[str]] = defaultdict(list)
    for owner, name in connection.execute(statement):
        found[owner].append(name)
    return found


def _names(connection: Connection) -> dict[str, str]:
    """Names of models by fingerprint; of several names the last by alphabet."""
    statement = sa.select(model.c.fingerprint, model.c.name).order_by(model.c.name)
    return dict(connection.execute(statement).all())


def _creations(connection: Connection, job_ids: set[str]) -> dict[str, datetime]:
    statement = sa.select(job.c.id, job.c.created_at).where(job.c.id.in_(sorted(job_ids)))
    return dict(connection.execute(statement).all())

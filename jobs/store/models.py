"""Models: those that the planner plans for, and the GPU workers that serve them.

A job may name a model that is known here. Whether somebody serves it is for people: what a worker
claims is decided by fingerprints.
"""

from collections.abc import Collection
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.models import KnownModel, PlannedModel
from nightjar.jobs.store.common import now
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.model_tables import model, worker_model
from nightjar.jobs.store.tables import worker
from nightjar.jobs.store.waiting import SILENT_AFTER_S

# A worker that has been silent for so long does not come back, and serves nothing.
_GONE_AFTER = timedelta(days=1)
_row, _serves = model.c, worker_model.c
_WORKERS = (
    sa.select(sa.func.count())
    .select_from(worker_model)
    .join(worker, worker.c.owner == _serves.owner)
    .where(
        _serves.fingerprint == _row.fingerprint,
        worker.c.seen_at > sa.bindparam("since", type_=worker.c.seen_at.type),
    )
    .scalar_subquery()
)
_ALL = sa.select(
    _row.name, _row.fingerprint, _row.context_length, _row.created_at, _WORKERS
).order_by(_row.name)
_LIVING = sa.select(worker.c.owner).where(
    worker.c.seen_at > sa.bindparam("lately", type_=worker.c.seen_at.type)
)


class Models:
    """Which models there are, and who serves them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def plan_for(self, models: Collection[PlannedModel]) -> None:
        """Make these the known models; written by the planner that leads.

        A model of another name is not known any more. A name whose files have changed is a model
        that was created now.
        """
        fresh = self._database.insert(model)
        changed = fresh.on_conflict_do_update(
            index_elements=[_row.name],
            set_={name: fresh.excluded[name] for name in ("fingerprint", "created_at")}
            | {"context_length": fresh.excluded.context_length},
            where=_row.fingerprint != fresh.excluded.fingerprint,
        )
        others = sa.delete(model).where(_row.name.not_in([one.name for one in models]))
        gone = sa.delete(worker_model).where(_serves.owner.not_in(_LIVING))

        def work(connection: Connection) -> None:
            moment = now()
            for one in sorted(models, key=lambda one: one.name):
                connection.execute(changed, _values(one, moment))
            connection.execute(others)
            connection.execute(gone, {"lately": moment - _GONE_AFTER})

        self._database.write(work, durable=False)

    def serve(self, owner: str, fingerprints: Collection[str]) -> None:
        """Note which models a GPU worker serves; its heartbeats say that it lives."""
        rows = [{"owner": owner, "fingerprint": one} for one in sorted(fingerprints)]
        statement = self._database.insert(worker_model).on_conflict_do_nothing()
        self._database.write(lambda connection: connection.execute(statement, rows), durable=False)

    def leave(self, owner: str) -> None:
        """Note that a GPU worker serves nothing any more."""
        statement = sa.delete(worker_model).where(_serves.owner == owner)
        self._database.write(lambda connection: connection.execute(statement), durable=False)

    def known(self) -> list[KnownModel]:
        """The models that the planner plans for, by name."""
        since = now() - timedelta(seconds=SILENT_AFTER_S)
        with self._database.reading() as connection:
            return [KnownModel(*row) for row in connection.execute(_ALL, {"since": since})]


def _values(one: PlannedModel, moment: datetime) -> dict[str, object]:
    return {
        "name": one.name,
        "fingerprint": one.fingerprint,
        "context_length": one.context_length,
        "created_at": moment,
    }

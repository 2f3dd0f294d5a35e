"""The backlog: requests that wait to be planned, and those that cannot be planned."""

from collections.abc import Collection
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs import lifecycle
from nightjar.jobs.errors import StoreError
from nightjar.jobs.records import JobToPlan, NewResult, PlanningRange, QueuedRequest, RequestError
from nightjar.jobs.store.account_tables import tenant
from nightjar.jobs.store.awaiting import (
    HAS_UNPLANNED,
    LOCK_WAITING,
    WAITING_ROWS,
    planned_to,
    raise_planned_to,
)
from nightjar.jobs.store.bodies import load_body
from nightjar.jobs.store.body_rows import Bodies, Row
from nightjar.jobs.store.common import FAULT_STATUS
from nightjar.jobs.store.database import Database
from nightjar.jobs.store.outcomes import Outcomes
from nightjar.jobs.store.precedence import OVERTAKES, RANK, several_tenants, usable_weight
from nightjar.jobs.store.ready import in_rank_order
from nightjar.jobs.store.tables import job, request

# A job that cannot be planned fails in pieces, so that nobody waits long for the write lock.
FAILURES_PER_STEP = 2_000
_MOST_CHARACTERS = 500  # of a reason
_MOST_BESIDES = 10_000  # named in a statement
_LAST = 2**63 - 1  # the index of the last row that a job could have
_row = request.c
# Built once, as each pass uses them: building costs more than running.
_TO_PLAN = (
    sa.select(
        job.c.id,
        job.c.model,
        job.c.plan_failures,
        job.c.plan_error,
        job.c.tenant,
        job.c.live,
    )
    .where(
        job.c.state.in_(lifecycle.RUNNABLE),
        HAS_UNPLANNED,
    )
    .order_by(*RANK)
)
_FIRST_TO_PLAN = _TO_PLAN.limit(sa.bindparam("most"))
_NAMED = job.c.model == sa.bindparam("of_model")
# Where one model is planned for, it also computes jobs whose submitter named none.
_NAMED_OR_NONE = sa.or_(_NAMED, sa.not_(job.c.names_model))
_FIRST_OF_MODEL = _FIRST_TO_PLAN.where(_NAMED)
_FIRST_OF_ONLY_MODEL = _FIRST_TO_PLAN.where(_NAMED_OR_NONE)
_FIRST_CALL = _FIRST_TO_PLAN.where(
    job.c.live, job.c.model.in_(sa.bindparam("of_models", expanding=True))
)
_goes = (OVERTAKES.desc(), *RANK)
_place = sa.func.row_number().over(partition_by=job.c.tenant, order_by=_goes)


def _first_of_tenants(*of_model: sa.ColumnElement[bool]) -> sa.Select[Any]:
    in_turn = (
        sa.select(
            job.c.id,
            job.c.model,
            job.c.plan_failures,
            job.c.plan_error,
            job.c.tenant,
            job.c.live,
            OVERTAKES.label("overtakes"),
            RANK[0].label("rank"),
            _place.label("place"),
        )
        .where(
            job.c.state.in_(lifecycle.RUNNABLE),
            job.c.id.not_in(sa.bindparam("besides", expanding=True)),
            HAS_UNPLANNED,
            *of_model,
        )
        .subquery()
    )
    return (
        sa.select(in_turn, tenant.c.weight)
        .outerjoin(tenant, tenant.c.name == in_turn.c.tenant)
        .where(in_turn.c.place == 1)
        .order_by(in_turn.c.overtakes.desc(), in_turn.c.rank, in_turn.c.id)
    )


_FIRST_OF_TENANTS = _first_of_tenants()
_FIRST_OF_TENANTS_OF_MODEL = _first_of_tenants(_NAMED)
_FIRST_OF_TENANTS_OF_ONLY_MODEL = _first_of_tenants(_NAMED_OR_NONE)
_WAITING = (
    sa.select(_row.id, _row.row_index, _row.custom_id, _row.kind)
    .where(*WAITING_ROWS)
    .order_by(_row.row_index)
    .limit(sa.bindparam("most"))
)
_NOTE_REASON = (
    sa.update(job)
    .where(job.c.id == sa.bindparam("of_job"))
    .values(plan_error=sa.bindparam("reason"))
)


class Backlog:
    """What the planner reads before it plans, and writes when it cannot."""

    def __init__(self, database: Database, outcomes: Outcomes) -> None:
        self._database = database
        self._outcomes = outcomes
        self._bodies = Bodies(database)

    def jobs_to_plan(self) -> list[str]:
        """Jobs that have queued requests, in the order of their rank."""
        with self._database.reading() as connection:
            return list(connection.scalars(_TO_PLAN))

    def next_to_plan(
        self, besides: Collection[str] = (), model: str | None = None, *, is_only: bool = False
    ) -> JobToPlan | None:
        """The first job by rank that has queued requests and is not in `besides`, or None.

        `model` takes jobs of this model alone; if it `is_only`, also those whose submitter named
        none.
        """
        of_model = _FIRST_OF_ONLY_MODEL if is_only else _FIRST_OF_MODEL
        statement = _FIRST_TO_PLAN if model is None else of_model
        return self._first(statement, besides, {"of_model": model})

    def next_call(self, models: Collection[str], besides: Collection[str] = ()) -> JobToPlan | None:
        """The first single call for one of these models that has to be planned, or None."""
        return self._first(_FIRST_CALL, besides, {"of_models": list(models)})

    def _first(
        self, statement: sa.Select[Any], besides: Collection[str], values: dict[str, Any]
    ) -> JobToPlan | None:
        key = {**values, "most": len(besides) + 1}
        with self._database.reading() as connection:
            for row in connection.execute(statement, key).all():
                if row.id not in besides:
                    failures, error = row.plan_failures, row.plan_error
                    return JobToPlan(row.id, row.model, failures, error, row.tenant, live=row.live)
        return None

    def first_of_tenants(
        self, besides: Collection[str] = (), model: str | None = None, *, is_only: bool = False
    ) -> list[JobToPlan]:
        """The first job of each tenant that has queued requests and is not in `besides`.

        Those that overtake other tenants come first, then all by rank. `model` and `is_only` are
        those of `next_to_plan`.
        """
        of_model = _FIRST_OF_TENANTS_OF_ONLY_MODEL if is_only else _FIRST_OF_TENANTS_OF_MODEL
        statement = _FIRST_OF_TENANTS if model is None else of_model
        key = {"besides": list(besides)[:_MOST_BESIDES], "of_model": model}
        with self._database.reading() as connection:
            if several_tenants(connection):
                return [
                    JobToPlan(
                        row.id,
                        row.model,
                        row.plan_failures,
                        row.plan_error,
                        row.tenant,
                        usable_weight(row.weight),
                        bool(row.overtakes),
                        row.live,
                    )
                    for row in connection.execute(statement, key)
                    if row.id not in besides
                ]
        alone = self.next_to_plan(besides, model, is_only=is_only)
        return [] if alone is None else [alone]

    def is_planned_ahead(self, of_tenant: str, fingerprint: str, micro_batches: int) -> bool:
        """Whether the tenant has more ready micro-batches for the model than so many."""
        most = micro_batches + 1
        with self._database.reading() as connection:
            return len([*in_rank_order(connection, fingerprint, most, tenant=of_tenant)]) == most

    def queued_requests(
        self,
        job_id: str,
        limit: int,
        most_bytes: int | None = None,
        within: PlanningRange | None = None,
    ) -> list[QueuedRequest]:
        """The first requests of the job that are in no micro-batch yet, in row order.

        Args:
            job_id: The job.
            limit: Most requests.
            most_bytes: Most bytes of their bodies; the first one comes whatever its size.
            within: The rows to look at; all by default.
        """
        first, last = (0, _LAST) if within is None else (within.first, within.end - 1)
        key = {"of_job": job_id, "most": limit, "last": last}
        with self._database.reading() as connection:
            key["first"] = max(first, planned_to(connection, job_id))
            rows = connection.execute(_WAITING, key).all()
            wanted = [Row(id_, index) for id_, index, *_ in rows]
            bodies = self._bodies.read(connection, job_id, wanted, most_bytes)
        found: list[QueuedRequest] = []
        total = 0
        for id_, index, custom_id, kind in rows:
            body = bodies.get(id_)
            if body is None and not found:
                raise StoreError(f"row {index} of job {job_id} has no body")
            if body is None:  # it did not fit
                break
            total += len(body)
            if most_bytes is not None and total > most_bytes and found:
                break
            found.append(
                QueuedRequest(id_, job_id, index, custom_id, kind, load_body(body), len(body))
            )
        return found

    def note_plan_error(self, job_id: str, reason: str) -> None:
        """Note why the chunk could not be planned."""
        values = {"of_job": job_id, "reason": reason[:_MOST_CHARACTERS]}
        self._database.write(lambda connection: connection.execute(_NOTE_REASON, values))

    def fail_unplanned(self, job_id: str, error: RequestError) -> int:
        """End some requests that wait for planning with this error; returns how many.

        What is planned already goes on. It returns 0 when nothing waits any more.
        """
        return self._outcomes.write(partial(self._fail_some, job_id=job_id, error=error))

    def _fail_some(self, connection: Connection, job_id: str, error: RequestError) -> int:
        first = planned_to(connection, job_id)
        some = {"of_job": job_id, "first": first, "last": first + FAILURES_PER_STEP - 1}
        indexes = dict(connection.execute(LOCK_WAITING, some).all())
        failures = [NewResult(id_, FAULT_STATUS, None, error) for id_ in indexes]
        self._outcomes.land(connection, job_id, failures, indexes)
        raise_planned_to(connection, job_id)
        return len(indexes)

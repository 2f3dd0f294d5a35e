"""Bodies of requests, in a table of their own."""

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.store.parts import InPartOf, in_parts_of
from nightjar.jobs.store.tables import request, request_body

BODY: sa.ColumnElement[str] = sa.func.coalesce(request_body.c.body, request.c.body)
_is_own = request_body.c.request_id == request.c.id


def bodies_of(job_id: sa.ColumnElement[str]) -> tuple[sa.Table, sa.ColumnElement[bool]]:
    """What joins the bodies of a job's requests, isouter.

    An API of the version before puts bodies into `request`.
    """
    return request_body, sa.and_(_is_own, InPartOf(request_body.c.request_id, job_id))


def bodies_among(request_ids: Collection[int]) -> tuple[sa.Table, sa.ColumnElement[bool]]:
    """The same for these requests."""
    return request_body, sa.and_(_is_own, in_parts_of(request_body.c.request_id, request_ids))


def insert_bodies(
    connection: Connection, staged: sa.Table, job_id: str, which: sa.ColumnElement[bool]
) -> None:
    """Store the bodies of staged rows that have landed as requests and meet the condition."""
    # A scalar subquery, which is looked up in the unique index for each row. PostgreSQL has no
    # statistics of the new rows: a join might read all of them for each.
    landed_as = (
        sa.select(request.c.id)
        .where(
            request.c.job_id == job_id,
            request.c.row_index == staged.c.row_index,
            InPartOf(request.c.id, job_id),
        )
        .scalar_subquery()
    )
    rows = sa.select(landed_as, staged.c.body).where(which).order_by(staged.c.row_index)
    into = sa.insert(request_body).from_select(["request_id", "body"], rows)
    connection.execute(into)


def delete_bodies(connection: Connection, request_ids: Collection[int]) -> None:
    """Delete the bodies of requests that are about to be deleted."""
    column = request_body.c.request_id
    is_given = (column.in_(request_ids), in_parts_of(column, request_ids))
    connection.execute(sa.delete(request_body).where(*is_given))

"""Bodies of requests, in a table of their own."""

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from nightjar.jobs.store.tables import request, request_body

# For a join of `request`, isouter: an API of the version before puts bodies into `request`.
BODIES = (request_body, request_body.c.request_id == request.c.id)
BODY: sa.ColumnElement[str] = sa.func.coalesce(request_body.c.body, request.c.body)


def insert_bodies(
    connection: Connection, staged: sa.Table, job_id: str, which: sa.ColumnElement[bool]
) -> None:
    """Store the bodies of staged rows that have landed as requests and meet the condition."""
    # A scalar subquery, which is looked up in the unique index for each row. PostgreSQL has no
    # statistics of the new rows: a join might read all of them for each.
    landed_as = (
        sa.select(request.c.id)
        .where(request.c.job_id == job_id, request.c.row_index == staged.c.row_index)
        .scalar_subquery()
    )
    rows = sa.select(landed_as, staged.c.body).where(which).order_by(staged.c.row_index)
    into = sa.insert(request_body).from_select(["request_id", "body"], rows)
    connection.execute(into)


def delete_bodies(connection: Connection, request_ids: Collection[int] | sa.Select[int]) -> None:
    """Delete the bodies of requests that are about to be deleted."""
    connection.execute(sa.delete(request_body).where(request_body.c.request_id.in_(request_ids)))

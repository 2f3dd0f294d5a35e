"""Two indexes fewer for each row: what waits is found by `job.planned_to`, and the members of a
micro-batch by the list that its plan has.

SQLite keeps the index of micro-batches, as it looks there when one is deleted.
"""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import is_postgres

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None

_UNPLANNED = sa.text(
    "micro_batch_id IS NULL AND leader_id IS NULL AND kind IS NOT NULL"
    " AND (segments IS NULL OR length(segments) > 0)"
)
# Of jobs that are not over, by the index that goes.
_SET = (
    "UPDATE job SET planned_to = coalesce((SELECT min(row_index) FROM request WHERE "  # noqa: S608
    f"job_id = job.id AND {_UNPLANNED}), total) WHERE finished_at IS NULL"
)


# An index of a partitioned table cannot be dropped CONCURRENTLY. Shorter than the server's
# deadlock_timeout: this transaction gives way to those of others.
_LOCK_TIMEOUT_MS = 500


def upgrade() -> None:
    if is_postgres():
        op.execute(f"SET LOCAL lock_timeout = {_LOCK_TIMEOUT_MS}")
        op.execute("LOCK TABLE job, micro_batch, request")
    op.add_column("job", sa.Column("planned_to", sa.BigInteger, nullable=False, server_default="0"))
    op.execute(_SET)
    op.drop_index("ix_request_unplanned", "request")
    if is_postgres():
        op.drop_index("ix_request_micro_batch_id", "request")


def downgrade() -> None:
    if is_postgres():
        _create_index("ix_request_micro_batch_id", ["micro_batch_id"])
    _create_index("ix_request_unplanned", ["job_id", "row_index"], _UNPLANNED)
    op.drop_column("job", "planned_to")


def _create_index(name: str, columns: list[str], where: sa.TextClause | None = None) -> None:
    tables = {name: "request"}
    if is_postgres():  # of the first partition, by the name that the version before knows
        tables = {f"{name}_p0": "request_p0", name: "request"}
    for one, table in tables.items():
        op.create_index(one, table, columns, sqlite_where=where, postgresql_where=where)

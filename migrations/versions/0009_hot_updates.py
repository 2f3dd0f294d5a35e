"""Requests end without a write to any index: ix_request_unplanned instead of ix_request_queued.

The new index does not name the state, see jobs/store/tables.py. Requests that a planner of the
version before has refused, or refuses, are in it, which only costs that job's planning some time.
Building it reads the requests once; on PostgreSQL others continue meanwhile.
"""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import create_index, drop_index

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

UNPLANNED = sa.text(
    "micro_batch_id IS NULL AND leader_id IS NULL AND kind IS NOT NULL"
    " AND (segments IS NULL OR length(segments) > 0)"
)
QUEUED = sa.text("state = 'queued'")


def upgrade() -> None:
    _replace("ix_request_queued", "ix_request_unplanned", UNPLANNED)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE request SET (fillfactor = 75)")


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE request RESET (fillfactor)")
    _replace("ix_request_unplanned", "ix_request_queued", QUEUED)


def _replace(old: str, new: str, condition: sa.TextClause) -> None:
    create_index(new, "request", ["job_id", "row_index"], condition)
    drop_index(old, "request")

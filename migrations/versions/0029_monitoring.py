"""Monitoring: what a worker does now, and the trace that a job belongs to.

Online: two columns that may be null.
"""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import add_column

revision = "0029"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    add_column("worker", sa.Column("status", sa.Text))
    add_column("job", sa.Column("traceparent", sa.String(55)))


def downgrade() -> None:
    op.drop_column("job", "traceparent")
    op.drop_column("worker", "status")

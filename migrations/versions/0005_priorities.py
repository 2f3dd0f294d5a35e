"""Priorities of jobs: job.priority and job.rank_at.

Online: an empty column and one with a constant default are added without rewriting or copying the
table. A job without rank_at, of the version before, ranks by its creation.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("priority", sa.Integer, nullable=False, server_default="0"))
    op.add_column("job", sa.Column("rank_at", sa.DateTime(timezone=True)))


def downgrade() -> None:
    op.drop_column("job", "rank_at")
    op.drop_column("job", "priority")

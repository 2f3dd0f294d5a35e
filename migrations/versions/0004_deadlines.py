"""Deadlines of jobs: job.expires_at and job.expired.

Online: an empty column and one with a constant default are added without rewriting or copying the
table, and processes that do not know them still submit.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("expires_at", sa.DateTime(timezone=True)))
    expired = sa.Column("expired", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("job", expired)


def downgrade() -> None:
    op.drop_column("job", "expired")
    op.drop_column("job", "expires_at")

"""Signs of life of the processes that run tasks."""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "task_runner",
        sa.Column("owner", sa.String(255), primary_key=True),
        sa.Column("counter", sa.BigInteger, nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        if_not_exists=True,
    )


def downgrade() -> None:
    op.drop_table("task_runner")

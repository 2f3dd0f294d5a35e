"""Planners, and the ranges of rows that they plan now: several may plan one job."""

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "planner",
        sa.Column("owner", sa.String(255), primary_key=True),
        sa.Column("counter", sa.BigInteger, nullable=False),
        sa.Column("plans_with", sa.Text, nullable=False),
    )
    op.create_table(
        "planning_range",
        sa.Column(
            "job_id", sa.String(64), sa.ForeignKey("job.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("first", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("end", sa.BigInteger, nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Index("ix_planning_range_owner", "owner"),
    )


def downgrade() -> None:
    op.drop_table("planning_range")
    op.drop_table("planner")

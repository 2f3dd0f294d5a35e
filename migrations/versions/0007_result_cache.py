"""Answers kept for equal requests to come: cached_result.

Online: a table that no process of the version before uses.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
COUNTS = ("prompt_tokens", "completion_tokens", "requested_tokens", "saved_tokens")


def upgrade() -> None:
    op.create_table(
        "cached_result",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in COUNTS),
        sa.Column("finish_reason", sa.String(32)),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_cached_result"),
        sa.UniqueConstraint("key", name="uq_cached_result_key"),
    )


def downgrade() -> None:
    op.drop_table("cached_result")

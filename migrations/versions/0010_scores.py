"""Scores of documents kept for rankings to come: cached_score.

Online: a table that no process of the version before uses.
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "cached_score",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("mean_nll", sa.Double, nullable=False),
        sa.Column("token_count", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_cached_score"),
        sa.UniqueConstraint("key", name="uq_cached_score_key"),
    )


def downgrade() -> None:
    op.drop_table("cached_score")

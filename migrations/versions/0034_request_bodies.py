"""Bodies and token ids beside the requests' rows, which are written anew at each state.

Rows that are there keep theirs; they are read where they are.
"""

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    big_id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "request_body",
        sa.Column("request_id", big_id, primary_key=True, autoincrement=False),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_table(
        "micro_batch_tokens",
        sa.Column(
            "micro_batch_id",
            big_id,
            sa.ForeignKey("micro_batch.id", ondelete="CASCADE"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("token_ids", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    """Give the version before what it reads; micro-batches of this one are planned anew."""
    op.execute(
        "UPDATE request SET body = (SELECT body FROM request_body WHERE request_id = request.id) "
        "WHERE body IS NULL"
    )
    op.execute(
        "UPDATE request SET state = 'queued', micro_batch_id = NULL WHERE state = 'planned' "
        "AND micro_batch_id IN (SELECT micro_batch_id FROM micro_batch_tokens)"
    )
    op.execute(
        "UPDATE micro_batch SET state = 'replanned', owner = NULL "
        "WHERE id IN (SELECT micro_batch_id FROM micro_batch_tokens) "
        "AND state IN ('ready', 'dispatched', 'leased')"
    )
    op.drop_table("micro_batch_tokens")
    op.drop_table("request_body")

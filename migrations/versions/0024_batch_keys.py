"""Batches that wait for their model, and idempotency keys of batches.

Columns with a constant default are added without rewriting the table.
"""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import add_column, create_index, drop_index

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

_INDEX = "ix_batch_idempotency_key"


def upgrade() -> None:
    waits = sa.Column("waits_for_model", sa.Boolean, nullable=False, server_default=sa.false())
    add_column("batch", waits)
    add_column("batch", sa.Column("idempotency_key", sa.String(255)))
    add_column("batch", sa.Column("submission_digest", sa.String(64)))
    add_column("batch", sa.Column("input_digest", sa.String(64)))
    create_index(_INDEX, "batch", ["idempotency_key"], unique=True)


def downgrade() -> None:
    drop_index(_INDEX, "batch")
    for name in ("input_digest", "submission_digest", "idempotency_key", "waits_for_model"):
        op.drop_column("batch", name)

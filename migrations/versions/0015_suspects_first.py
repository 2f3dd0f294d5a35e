"""Suspects are dispatched before the rest of their priority: an index of those that are ready.

They are few, and they have the highest ids. Without the index, all ready micro-batches are read to
find them.
"""

import sqlalchemy as sa

from nightjar.migrations.indexes import create_index, drop_index

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

READY_SUSPECTS = sa.text("state || '' = 'ready' AND isolated")


def upgrade() -> None:
    columns = ["fingerprint", "job_id", "id"]
    create_index("ix_micro_batch_suspects", "micro_batch", columns, READY_SUSPECTS)


def downgrade() -> None:
    drop_index("ix_micro_batch_suspects", "micro_batch")

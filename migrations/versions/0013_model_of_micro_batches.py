"""A micro-batch names the model that it was planned for: micro_batch.fingerprint.

Online: a column with a constant default is added without rewriting or copying the table. What a
planner of the version before writes has the default, which no worker of this version claims; the
planner that leads takes it apart and plans it anew. A worker of the version before does not ask
for the fingerprint: it hears of nothing that this version plans, as its queues have other names,
unless a planner of the version before leads. Replace the planners first.

The index holds what is ready alone, so that it is small however much has been computed.
"""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import add_column, create_index, drop_index

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

READY_ALONE = sa.text("state || '' = 'ready'")


def upgrade() -> None:
    column = sa.Column("fingerprint", sa.String(64), nullable=False, server_default=sa.text("''"))
    add_column("micro_batch", column)
    columns = ["fingerprint", "job_id", "id"]
    create_index("ix_micro_batch_ready", "micro_batch", columns, READY_ALONE)


def downgrade() -> None:
    drop_index("ix_micro_batch_ready", "micro_batch")
    op.drop_column("micro_batch", "fingerprint")

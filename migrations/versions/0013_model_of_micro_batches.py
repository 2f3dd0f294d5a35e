"""A micro-batch names the model that it was planned for: micro_batch.fingerprint.

Online: a column with a constant default is added without rewriting or copying the table. A planner
of the version before writes the default. No worker of this version claims such a micro-batch; the
leading planner takes it apart and plans its requests again. A worker of the version before does not
check the fingerprint. It gets no messages of this version, whose queues have other names, unless a
planner of the version before leads. Replace the planners first.

The index holds only ready micro-batches, so it is small however much has been computed.
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

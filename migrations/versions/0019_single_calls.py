"""Single calls: job.live, micro_batch.live, and the indexes that find and purge them.

Columns with a constant default are added without rewriting the table. The index on
micro_batch.job_id serves the check of the foreign key when a call's job is deleted.
"""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import add_column, create_index, drop_index

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

LIVE = sa.text("live")
LISTED = sa.text("NOT live")
READY_LIVE = sa.text("state || '' = 'ready' AND live")


def upgrade() -> None:
    for table in ("job", "micro_batch"):
        add_column(table, sa.Column("live", sa.Boolean, nullable=False, server_default=sa.false()))
    create_index("ix_job_listed", "job", ["tenant", "id"], LISTED)
    create_index("ix_job_live", "job", ["id"], LIVE)
    create_index("ix_micro_batch_live", "micro_batch", ["fingerprint", "id"], READY_LIVE)
    create_index("ix_micro_batch_job_id", "micro_batch", ["job_id"])


def downgrade() -> None:
    for name in ("ix_micro_batch_job_id", "ix_micro_batch_live"):
        drop_index(name, "micro_batch")
    for name in ("ix_job_live", "ix_job_listed"):
        drop_index(name, "job")
    for table in ("micro_batch", "job"):
        op.drop_column(table, "live")

"""Retention: how long the rows of a job are kept, and whether they are still there."""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import add_column, create_index, drop_index

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True)
_KEPT = sa.text("NOT live AND finished_at IS NOT NULL AND purged_at IS NULL")
_KEPT_BY_ITSELF = sa.text("keep_results_s IS NOT NULL AND purged_at IS NULL")
_PURGING = sa.text("purging")


def upgrade() -> None:
    add_column("tenant", sa.Column("keep_results_s", sa.BigInteger))
    add_column("job", sa.Column("keep_results_s", sa.BigInteger))
    add_column("job", sa.Column("purge_at", _Moment))
    add_column("job", sa.Column("purged_at", _Moment))
    add_column("job", sa.Column("purging", sa.Boolean, nullable=False, server_default=sa.false()))
    create_index("ix_job_kept", "job", ["tenant", "finished_at"], _KEPT)
    create_index("ix_job_kept_by_itself", "job", ["purge_at"], _KEPT_BY_ITSELF)
    create_index("ix_job_purging", "job", ["id"], _PURGING)
    create_index("ix_batch_input_file_id", "batch", ["input_file_id"])


def downgrade() -> None:
    drop_index("ix_batch_input_file_id", "batch")
    for name in ("ix_job_purging", "ix_job_kept_by_itself", "ix_job_kept"):
        drop_index(name, "job")
    for name in ("purging", "purged_at", "purge_at", "keep_results_s"):
        op.drop_column("job", name)
    op.drop_column("tenant", "keep_results_s")

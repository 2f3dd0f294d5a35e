"""Batches: what OpenAI's view of a job needs beside the job."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "batch",
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("stage", sa.String(32), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("input_file_id", sa.String(64), nullable=False),
        sa.Column("completion_window", sa.String(16), nullable=False),
        sa.Column("completion_window_s", sa.Double, nullable=False),
        sa.Column("metadata", sa.Text, nullable=False),
        sa.Column("strict", sa.Boolean, nullable=False),
        sa.Column("model", sa.Text),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("output_expires_after_s", sa.BigInteger),
        sa.Column("errors", sa.Text),
        sa.Column("created_at", _Moment, nullable=False),
        sa.Column("in_progress_at", _Moment),
        sa.Column("cancelling_at", _Moment),
        sa.Column("ended_at", _Moment),
        sa.Column("output_file_id", sa.String(64)),
        sa.Column("error_file_id", sa.String(64)),
        sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
        sa.Column("counted_to", sa.BigInteger, nullable=False, server_default="-1"),
        sa.Column("output_lines", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("output_bytes", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("error_lines", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("error_bytes", sa.BigInteger, nullable=False, server_default="0"),
        if_not_exists=True,
    )
    op.create_index("ix_batch_tenant_job_id", "batch", ["tenant", "job_id"], if_not_exists=True)
    op.create_index("ix_batch_stage_job_id", "batch", ["stage", "job_id"], if_not_exists=True)


def downgrade() -> None:
    op.drop_table("batch")

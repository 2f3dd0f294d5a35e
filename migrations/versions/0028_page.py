"""The web page: sessions of browsers, and jobs of a tenant by state in the order of their ids."""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import create_index, drop_index

revision = "0028"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "page_session",
        sa.Column("token_sha256", sa.String(64), primary_key=True),
        sa.Column("key_sha256", sa.String(64), nullable=False),
        sa.Column("key_prefix", sa.String(32)),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        if_not_exists=True,
    )
    create_index("ix_page_session_expires_at", "page_session", ["expires_at"])
    create_index("ix_job_by_state", "job", ["tenant", "state", "id"], sa.text("NOT live"))


def downgrade() -> None:
    drop_index("ix_job_by_state", "job")
    op.drop_table("page_session")

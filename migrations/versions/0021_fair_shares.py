"""Fair shares: the virtual time of each tenant, and the tokens that are still to be charged.

The index on the jobs' states also has the tenant: so each pass sees quickly whether several tenants
have work.
"""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import add_column, create_index, drop_index

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_UNCHARGED = sa.text("uncharged IS NOT NULL")


def upgrade() -> None:
    op.create_table(
        "share",
        sa.Column("fingerprint", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), primary_key=True),
        sa.Column("virtual_time", sa.Double, nullable=False, server_default="0"),
        sa.Column("pace", sa.Double, nullable=False, server_default="1"),
        sa.Column("computed_tokens", sa.BigInteger, nullable=False, server_default="0"),
        if_not_exists=True,
    )
    op.create_table(
        "virtual_clock",
        sa.Column("fingerprint", sa.String(64), primary_key=True),
        sa.Column("virtual_time", sa.Double, nullable=False),
        if_not_exists=True,
    )
    add_column("micro_batch", sa.Column("uncharged", sa.BigInteger))
    create_index("ix_micro_batch_uncharged", "micro_batch", ["fingerprint", "id"], _UNCHARGED)
    create_index("ix_job_state_tenant", "job", ["state", "tenant"])
    drop_index("ix_job_state", "job")


def downgrade() -> None:
    create_index("ix_job_state", "job", ["state"])
    drop_index("ix_job_state_tenant", "job")
    drop_index("ix_micro_batch_uncharged", "micro_batch")
    op.drop_column("micro_batch", "uncharged")
    op.drop_table("virtual_clock")
    op.drop_table("share")

"""Tenants and their keys; each job is a tenant's.

Columns with a constant default are added without rewriting the table.
"""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import add_column, create_index, drop_index

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_Moment = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "tenant",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("weight", sa.Double, nullable=False, server_default="1"),
        sa.Column("requests_a_minute", sa.BigInteger),
        sa.Column("tokens_a_day", sa.BigInteger),
        sa.Column("rows_waiting", sa.BigInteger),
        sa.Column("bytes_stored", sa.BigInteger),
        sa.Column("created_at", _Moment, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "api_key",
        sa.Column("id", _BigId, primary_key=True),
        sa.Column("tenant", sa.String(64), sa.ForeignKey("tenant.name"), nullable=False),
        sa.Column("prefix", sa.String(32), nullable=False, unique=True),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(32), nullable=False),
        sa.Column("label", sa.Text, nullable=False),
        sa.Column("created_at", _Moment, nullable=False),
        sa.Column("expires_at", _Moment),
        sa.Column("revoked_at", _Moment),
        if_not_exists=True,
    )
    op.create_index("ix_api_key_tenant", "api_key", ["tenant"], if_not_exists=True)
    tenant = sa.Column("tenant", sa.String(64), nullable=False, server_default="default")
    add_column("job", tenant)
    create_index("ix_job_tenant_id", "job", ["tenant", "id"])


def downgrade() -> None:
    drop_index("ix_job_tenant_id", "job")
    op.drop_column("job", "tenant")
    op.drop_table("api_key")
    op.drop_table("tenant")

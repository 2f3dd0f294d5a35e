"""Jobs count the tokens of their newest day, for quotas of tenants.

Columns without a default, or with a constant one, are added without rewriting the table.
"""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import add_column, create_index, drop_index

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    add_column("job", sa.Column("tokens_day", sa.BigInteger))
    zero = sa.Column("day_tokens", sa.BigInteger, nullable=False, server_default="0")
    add_column("job", zero)
    create_index("ix_job_tenant_tokens_day", "job", ["tenant", "tokens_day"])


def downgrade() -> None:
    drop_index("ix_job_tenant_tokens_day", "job")
    op.drop_column("job", "day_tokens")
    op.drop_column("job", "tokens_day")

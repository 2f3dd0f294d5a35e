"""Open jobs: whether a job takes more rows, and what was appended last."""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import add_column

revision = "0032"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    add_column(
        "job", sa.Column("takes_rows", sa.Boolean, nullable=False, server_default=sa.false())
    )
    add_column("job", sa.Column("append_digest", sa.String(64)))


def downgrade() -> None:
    op.drop_column("job", "append_digest")
    op.drop_column("job", "takes_rows")

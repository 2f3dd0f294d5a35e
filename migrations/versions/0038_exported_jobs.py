"""When a job's results were last exported."""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import add_column

revision = "0038"
down_revision = "0035"
branch_labels = None
depends_on = None


def upgrade() -> None:
    add_column("job", sa.Column("exported_at", sa.DateTime(timezone=True)))


def downgrade() -> None:
    op.drop_column("job", "exported_at")

"""What the planner that leads can do, so that a newer one takes the lead from an older one."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("leader", sa.Column("protocol", sa.Integer))
    op.add_column("leader", sa.Column("protocol_epoch", sa.Integer))


def downgrade() -> None:
    op.drop_column("leader", "protocol_epoch")
    op.drop_column("leader", "protocol")

"""Suspects are computed alone: micro_batch.isolated.

Online: a column with a constant default is added without rewriting or copying the table, and
planners that do not know it still write their plans.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("isolated", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("micro_batch", column)


def downgrade() -> None:
    op.drop_column("micro_batch", "isolated")

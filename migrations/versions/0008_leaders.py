"""The process that leads, where only one of several should act: leader.

Online: a table that no process of the version before uses.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "leader",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(255)),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("counter", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leader"),
    )


def downgrade() -> None:
    op.drop_table("leader")

"""The seconds that each worker's compute processes have spent: worker.engine_s, worker.load_s.

Online: a column with a constant default is added without rewriting or copying the table, and
workers that do not know it still write their beats.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

COLUMNS = ("engine_s", "load_s")


def upgrade() -> None:
    for name in COLUMNS:
        column = sa.Column(name, sa.Double, nullable=False, server_default="0")
        op.add_column("worker", column)


def downgrade() -> None:
    for name in reversed(COLUMNS):
        op.drop_column("worker", name)

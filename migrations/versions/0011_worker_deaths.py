"""Deaths of whole workers are counted apart from crashes: micro_batch.worker_deaths.

Online: a column with a constant default is added without rewriting or copying the table. A sweeper
of the version before counts them as crashes, as it always did.
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("worker_deaths", sa.Integer, nullable=False, server_default="0")
    op.add_column("micro_batch", column)


def downgrade() -> None:
    op.drop_column("micro_batch", "worker_deaths")

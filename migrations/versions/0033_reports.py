"""When a micro-batch was planned, leased and ended, and the tally of its results, for reports."""

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0027"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True)
_MOMENTS = ("planned_at", "leased_at", "ended_at")


def upgrade() -> None:
    for name in _MOMENTS:
        op.add_column("micro_batch", sa.Column(name, _Moment))
    op.add_column("micro_batch", sa.Column("tally", sa.Text))


def downgrade() -> None:
    op.drop_column("micro_batch", "tally")
    for name in reversed(_MOMENTS):
        op.drop_column("micro_batch", name)

"""How often the planning of a job has failed since its last progress, and why.

A column with a constant default is added without rewriting the table; a planner of the version
before neither reads nor writes it.
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("plan_failures", sa.Integer, nullable=False, server_default="0"))
    op.add_column("job", sa.Column("plan_error", sa.Text))


def downgrade() -> None:
    op.drop_column("job", "plan_error")
    op.drop_column("job", "plan_failures")

"""The models of a deployment, who serves them, and jobs that name theirs.

Columns with a constant default are added without rewriting the table.
"""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import is_postgres

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "model",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("context_length", sa.BigInteger, nullable=False),
        sa.Column("created_at", _Moment, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "worker_model",
        sa.Column("owner", sa.String(255), primary_key=True),
        sa.Column("fingerprint", sa.String(64), primary_key=True),
        if_not_exists=True,
    )
    op.create_index(
        "ix_worker_model_fingerprint", "worker_model", ["fingerprint"], if_not_exists=True
    )
    column = sa.Column("names_model", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("job", column, if_not_exists=True if is_postgres() else None)


def downgrade() -> None:
    op.drop_column("job", "names_model")
    op.drop_table("worker_model")
    op.drop_table("model")

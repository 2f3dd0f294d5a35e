"""The order of landing, the digest of what came with an Idempotency-Key, the completion window.

Online: columns that are null or have a constant default, and a table that starts empty. Results
that landed before, or that a worker of the version before lands, get their number in the order at
the first request for it (jobs/store/landings.py).
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("landed", "taken_back"):
        column = sa.Column(name, sa.BigInteger, nullable=False, server_default="0")
        op.add_column("job", column)
    op.add_column("job", sa.Column("submission_digest", sa.String(64)))
    op.add_column("job", sa.Column("completion_window_s", sa.Double))
    op.add_column("result", sa.Column("landing", sa.BigInteger))
    op.create_table(
        "landing",
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("first", sa.BigInteger, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("request_ids", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "first", name="pk_landing"),
    )


def downgrade() -> None:
    op.drop_table("landing")
    op.drop_column("result", "landing")
    for name in ("completion_window_s", "submission_digest", "taken_back", "landed"):
        op.drop_column("job", name)

"""Equal requests are computed once: request.leader_id, result.reused, job.reused, reused_tokens.

Online: empty columns and such with a constant default are added without rewriting or copying the
tables. The index has no row and is built while others work. The sweeper lands the followers of
requests that workers of the version before end.
"""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import add_column, create_index

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

COUNTERS = ("reused", "reused_tokens")
IS_FOLLOWING = sa.text("leader_id IS NOT NULL")
BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    for name in COUNTERS:
        column = sa.Column(name, sa.BigInteger, nullable=False, server_default="0")
        add_column("job", column)
    add_column("request", sa.Column("leader_id", BIG_ID))
    add_column("result", sa.Column("reused", sa.String(32)))
    create_index("ix_request_following", "request", ["job_id", "leader_id"], IS_FOLLOWING)


def downgrade() -> None:
    op.drop_index("ix_request_following", "request")
    op.drop_column("result", "reused")
    op.drop_column("request", "leader_id")
    for name in reversed(COUNTERS):
        op.drop_column("job", name)

"""Files: their rows, and the parts of those that are uploaded.

PostgreSQL stores parts as they are: to compress them would take longer than to write them.
"""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import is_postgres

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_Moment = sa.DateTime(timezone=True)
_INDEXES = (["tenant", "id"], ["tenant", "purpose", "id"], ["state", "expires_at"])


def upgrade() -> None:
    op.create_table(
        "file",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.String(64)),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("counter", sa.BigInteger, nullable=False),
        sa.Column("created_at", _Moment, nullable=False),
        sa.Column("expires_at", _Moment),
        sa.Column("job_id", sa.String(64)),
        sa.Column("outcome", sa.String(32)),
        if_not_exists=True,
    )
    for columns in _INDEXES:
        op.create_index(f"ix_file_{'_'.join(columns)}", "file", columns, if_not_exists=True)
    op.create_table(
        "file_part",
        sa.Column("file_id", sa.String(64), sa.ForeignKey("file.id"), primary_key=True),
        sa.Column("number", _BigId, primary_key=True, autoincrement=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        if_not_exists=True,
    )
    if is_postgres():
        op.execute("ALTER TABLE file_part ALTER COLUMN data SET STORAGE EXTERNAL")


def downgrade() -> None:
    op.drop_table("file_part")
    op.drop_table("file")

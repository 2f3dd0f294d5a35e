"""Tables of files: those that are uploaded, and those that show the results of a batch."""

import sqlalchemy as sa

from nightjar.jobs.file_records import FilePurpose, FileState
from nightjar.jobs.store.columns import BigId, UtcDateTime, metadata, state_column

file = sa.Table(
    "file",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),  # sorts by creation
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("purpose", state_column(FilePurpose), nullable=False),
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),  # stored so far, while it is uploaded
    sa.Column("sha256", sa.String(64)),
    sa.Column("state", state_column(FileState), nullable=False),
    sa.Column("counter", sa.BigInteger, nullable=False),  # raised while it is uploaded
    sa.Column("created_at", UtcDateTime, nullable=False),
    # Of a deleted file: when its row goes.
    sa.Column("expires_at", UtcDateTime),
    # A result file has no parts: its content is a view of this job's results.
    sa.Column("job_id", sa.String(64)),
    sa.Column("outcome", sa.String(32)),
    # For listings: the files of one tenant, also those of one purpose, newest first.
    sa.Index(None, "tenant", "id"),
    sa.Index(None, "tenant", "purpose", "id"),
    # For sweeping.
    sa.Index(None, "state", "expires_at"),
)

file_part = sa.Table(
    "file_part",
    metadata,
    sa.Column("file_id", sa.ForeignKey("file.id"), primary_key=True),
    sa.Column("number", BigId, primary_key=True, autoincrement=False),  # from 0
    # The migration tells PostgreSQL not to compress it: that costs more time than the disk does.
    sa.Column("data", sa.LargeBinary, nullable=False),
)

"""The table of browsers that have signed in."""

import sqlalchemy as sa

from nightjar.jobs.store.columns import UtcDateTime, metadata

# A table, so that a session outlives a restart of the API, and several APIs share it.
page_session = sa.Table(
    "page_session",
    metadata,
    # Digest of what the cookie holds: whoever reads the table cannot use it.
    sa.Column("token_sha256", sa.String(64), primary_key=True),
    sa.Column("key_sha256", sa.String(64), nullable=False),
    sa.Column("key_prefix", sa.String(32)),  # null: of the operator's own secret
    sa.Column("expires_at", UtcDateTime, nullable=False, index=True),
)

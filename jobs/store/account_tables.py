"""Tables of those who use a deployment: tenants and their keys."""

import sqlalchemy as sa

from nightjar.jobs.states import Scope
from nightjar.jobs.store.columns import BigId, UtcDateTime, metadata, state_column

tenant = sa.Table(
    "tenant",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    # Its share of the computed tokens beside other tenants that have work.
    sa.Column("weight", sa.Double, nullable=False, server_default="1"),
    # Most requests to the API a minute, tokens a day, rows that wait, bytes of files; null: any.
    sa.Column("requests_a_minute", sa.BigInteger),
    sa.Column("tokens_a_day", sa.BigInteger),
    sa.Column("rows_waiting", sa.BigInteger),
    sa.Column("bytes_stored", sa.BigInteger),
    # So long after their end the rows of its jobs are kept; null: as the deployment says.
    sa.Column("keep_results_s", sa.BigInteger),
    sa.Column("created_at", UtcDateTime, nullable=False),
)

api_key = sa.Table(
    "api_key",
    metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("tenant", sa.ForeignKey("tenant.name"), nullable=False, index=True),
    # The beginning of the key, by which people recognise it and the API finds it.
    sa.Column("prefix", sa.String(32), nullable=False, unique=True),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("scope", state_column(Scope), nullable=False),
    sa.Column("label", sa.Text, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("expires_at", UtcDateTime),
    sa.Column("revoked_at", UtcDateTime),
)

"""Tables of fair shares: how far each tenant has come in each model's tokens."""

import sqlalchemy as sa

from nightjar.jobs.store.columns import metadata

# One row for each tenant that a model has computed for.
share = sa.Table(
    "share",
    metadata,
    sa.Column("fingerprint", sa.String(64), primary_key=True),
    sa.Column("tenant", sa.String(64), primary_key=True),
    # Computed tokens by the weight of the tenant at that time, plus what its idle times add.
    sa.Column("virtual_time", sa.Double, nullable=False, server_default="0"),
    # Computed tokens over planned tokens, of the latest micro-batches.
    sa.Column("pace", sa.Double, nullable=False, server_default="1"),
    sa.Column("computed_tokens", sa.BigInteger, nullable=False, server_default="0"),
)

# The smallest virtual time that a tenant of the model can have; it never falls.
virtual_clock = sa.Table(
    "virtual_clock",
    metadata,
    sa.Column("fingerprint", sa.String(64), primary_key=True),
    sa.Column("virtual_time", sa.Double, nullable=False),
)

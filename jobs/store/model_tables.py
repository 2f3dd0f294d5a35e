"""Tables of models: what the planner plans for, and which GPU worker serves what."""

import sqlalchemy as sa

from nightjar.jobs.store.columns import UtcDateTime, metadata

# The models of the planner that leads: it writes a row for each, and takes the others away.
model = sa.Table(
    "model",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("fingerprint", sa.String(64), nullable=False),
    sa.Column("context_length", sa.BigInteger, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
)

# A worker lives as long as its row in `worker` is young. Its rows here go when it ends in order;
# the planner takes away those of a worker that was killed.
worker_model = sa.Table(
    "worker_model",
    metadata,
    sa.Column("owner", sa.String(255), primary_key=True),
    sa.Column("fingerprint", sa.String(64), primary_key=True),
    sa.Index(None, "fingerprint"),
)

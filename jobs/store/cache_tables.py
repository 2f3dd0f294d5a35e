"""Tables of what is kept for later jobs: answers of requests, and scores of documents."""

import sqlalchemy as sa

from nightjar.jobs.store.columns import BigId, UtcDateTime, metadata

# Answers kept for equal requests of later jobs; the lowest ids are the oldest.
cached_result = sa.Table(
    "cached_result",
    metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("key", sa.String(64), nullable=False, unique=True),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("requested_tokens", sa.BigInteger, nullable=False),
    sa.Column("saved_tokens", sa.BigInteger, nullable=False),
    sa.Column("finish_reason", sa.String(32)),
    sa.Column("created_at", UtcDateTime, nullable=False),
)

# Scores of documents after queries, kept for later rankings.
cached_score = sa.Table(
    "cached_score",
    metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("key", sa.String(64), nullable=False, unique=True),
    sa.Column("mean_nll", sa.Double, nullable=False),
    sa.Column("token_count", sa.BigInteger, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
)

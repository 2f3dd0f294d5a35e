"""The table of batches: what OpenAI's view of a job needs beside the job."""

import sqlalchemy as sa

from nightjar.jobs.states import BatchStage
from nightjar.jobs.store.columns import UtcDateTime, metadata, state_column

batch = sa.Table(
    "batch",
    metadata,
    # Of the job that the batch becomes. No foreign key: the job's row appears when its rows land.
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("stage", state_column(BatchStage), nullable=False),
    sa.Column("endpoint", sa.String(64), nullable=False),
    sa.Column("input_file_id", sa.String(64), nullable=False),
    sa.Column("completion_window", sa.String(16), nullable=False),  # as it was asked for
    sa.Column("completion_window_s", sa.Double, nullable=False),
    sa.Column("metadata", sa.Text, nullable=False),
    sa.Column("strict", sa.Boolean, nullable=False),
    sa.Column("model", sa.Text),  # null: what the planner serves
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("output_expires_after_s", sa.BigInteger),
    sa.Column("errors", sa.Text),  # JSON: {"data": [...]}
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("in_progress_at", UtcDateTime),
    sa.Column("cancelling_at", UtcDateTime),
    sa.Column("ended_at", UtcDateTime),
    sa.Column("output_file_id", sa.String(64)),
    sa.Column("error_file_id", sa.String(64)),
    # How often a planner began to read its file and did not come to an end.
    sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),
    # How far its result files are counted, and what they hold up to there.
    sa.Column("counted_to", sa.BigInteger, nullable=False, server_default="-1"),
    sa.Column("output_lines", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("output_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("error_lines", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("error_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("waits_for_model", sa.Boolean, nullable=False, server_default=sa.false()),
    # As `jobs/store/idempotency.py` writes it, so that tenants do not share keys.
    sa.Column("idempotency_key", sa.String(255)),
    # With a key: SHA-256 of the fields beside the file, and of the file.
    sa.Column("submission_digest", sa.String(64)),
    sa.Column("input_digest", sa.String(64)),
    sa.Index(None, "idempotency_key", unique=True),
    # For listings: the batches of one tenant, newest first.
    sa.Index(None, "tenant", "job_id"),
    # For planners: those that are to be read, or finalized.
    sa.Index(None, "stage", "job_id"),
    # For purging: the batches that read a file.
    sa.Index(None, "input_file_id"),
)

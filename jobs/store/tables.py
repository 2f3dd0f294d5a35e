"""The tables: one set for SQLite and PostgreSQL.

JSON is kept as text: the store writes and reads it once, and neither database has to parse it.
Token ids are packed bytes (jobs/store/token_ids.py).
"""

import sqlalchemy as sa

from nightjar.jobs.records import DEFAULT_TENANT
from nightjar.jobs.states import JobState, MicroBatchState, RequestKind, RequestState, Reuse
from nightjar.jobs.store import storage
from nightjar.jobs.store.columns import BigId, UtcDateTime, metadata, state_column

# Conditions of partial indexes, spelt alike in both databases.
LIVE = sa.text("live")
LISTED = sa.text("NOT live")
KEPT = sa.text("NOT live AND finished_at IS NOT NULL AND purged_at IS NULL")
KEPT_BY_ITSELF = sa.text("keep_results_s IS NOT NULL AND purged_at IS NULL")
PURGING = sa.text("purging")

job = sa.Table(
    "job",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),  # sorts by creation
    sa.Column("state", state_column(JobState), nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    # As `jobs/store/idempotency.py` writes it, so that tenants do not share keys.
    sa.Column("idempotency_key", sa.String(255), unique=True),
    sa.Column("metadata", sa.Text, nullable=False),
    sa.Column("cancel_requested", sa.Boolean, nullable=False),
    # Its deadline has passed. With a server default, as an API of the version before may submit.
    sa.Column("expired", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("total", sa.BigInteger, nullable=False),
    sa.Column("completed", sa.BigInteger, nullable=False),
    sa.Column("failed", sa.BigInteger, nullable=False),
    sa.Column("cancelled", sa.BigInteger, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("requested_tokens", sa.BigInteger, nullable=False),
    sa.Column("saved_tokens", sa.BigInteger, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("started_at", UtcDateTime),
    sa.Column("finished_at", UtcDateTime),
    sa.Column("expires_at", UtcDateTime),
    sa.Column("completion_window_s", sa.Double),  # null: none, or of the version before
    sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
    # The job with the earlier moment goes first: the creation, less what the priority is worth.
    sa.Column("rank_at", UtcDateTime),
    sa.Column("reused", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("reused_tokens", sa.BigInteger, nullable=False, server_default="0"),
    # Positions given in the order of landing, and how many of them retries have emptied.
    sa.Column("landed", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("taken_back", sa.BigInteger, nullable=False, server_default="0"),
    # Digest of the rows and parameters that came with an idempotency key.
    sa.Column("submission_digest", sa.String(64)),
    # Failures to plan since the last success, and the reason of the latest.
    sa.Column("plan_failures", sa.Integer, nullable=False, server_default="0"),
    sa.Column("plan_error", sa.Text),
    # Whose job it is. With a server default, as an API of the version before may submit.
    sa.Column("tenant", sa.String(64), nullable=False, server_default=DEFAULT_TENANT),
    # A single call of the API: a job of one row, for which a client waits.
    sa.Column("live", sa.Boolean, nullable=False, server_default=sa.false()),
    # The newest day (of UTC, from 1970) on which results landed, and the tokens of those results.
    sa.Column("tokens_day", sa.BigInteger),
    sa.Column("day_tokens", sa.BigInteger, nullable=False, server_default="0"),
    # Its submitter has named the model. A job that names none is computed by whichever model a
    # deployment of one model serves.
    sa.Column("names_model", sa.Boolean, nullable=False, server_default=sa.false()),
    # So long after its end its rows are kept, as its submitter asked; null: as the deployment says.
    sa.Column("keep_results_s", sa.BigInteger),
    # When that time is over. The sweeper writes it once the job is over.
    sa.Column("purge_at", UtcDateTime),
    # From this moment nobody sees its rows; while `purging`, some of them still have to be deleted.
    sa.Column("purged_at", UtcDateTime),
    sa.Column("purging", sa.Boolean, nullable=False, server_default=sa.false()),
    # When its results were last exported whole; null again once rows are retried.
    sa.Column("exported_at", UtcDateTime),
    # The trace of the call that made it, as the W3C writes it; null: it is not traced.
    sa.Column("traceparent", sa.String(55)),
    # An open job: it may get more rows, and does not end before it is sealed.
    sa.Column("takes_rows", sa.Boolean, nullable=False, server_default=sa.false()),
    # Rows before this one are planned or over (`jobs/store/awaiting.py`).
    sa.Column("planned_to", sa.BigInteger, nullable=False, server_default="0"),
    # Digest of the rows that were appended last, so that they are not appended twice.
    sa.Column("append_digest", sa.String(64)),
    # For listings: the jobs of one tenant, newest first.
    sa.Index(None, "tenant", "id"),
    # The same without single calls, of which there may be far more than jobs.
    sa.Index("ix_job_listed", "tenant", "id", sqlite_where=LISTED, postgresql_where=LISTED),
    # The same of one state.
    sa.Index(
        "ix_job_by_state", "tenant", "state", "id", sqlite_where=LISTED, postgresql_where=LISTED
    ),
    # For purging: the oldest single calls.
    sa.Index("ix_job_live", "id", sqlite_where=LIVE, postgresql_where=LIVE),
    # For each pass: the open jobs, all of them or of one tenant.
    sa.Index(None, "state", "tenant"),
    # For quotas. A job's day changes once a day, so landing seldom writes to this index.
    sa.Index(None, "tenant", "tokens_day"),
    # For purging: jobs that are over, those with a time of their own, and those on their way out.
    sa.Index("ix_job_kept", "tenant", "finished_at", sqlite_where=KEPT, postgresql_where=KEPT),
    sa.Index(
        "ix_job_kept_by_itself",
        "purge_at",
        sqlite_where=KEPT_BY_ITSELF,
        postgresql_where=KEPT_BY_ITSELF,
    ),
    sa.Index("ix_job_purging", "id", sqlite_where=PURGING, postgresql_where=PURGING),
    postgresql_with=storage.COUNTERS,
)

# The condition of ix_micro_batch_ready, spelt so that no other index seems to serve it: SQLite
# would rather read everything that is ready by its state.
READY_ALONE = sa.text("state || '' = 'ready'")
READY_SUSPECTS = sa.text("state || '' = 'ready' AND isolated")
READY_LIVE = sa.text("state || '' = 'ready' AND live")
UNCHARGED = sa.text("uncharged IS NOT NULL")
OWNED = sa.text("owner IS NOT NULL")

micro_batch = sa.Table(
    "micro_batch",
    metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("job_id", sa.ForeignKey("job.id"), nullable=False),
    sa.Column("kind", state_column(RequestKind), nullable=False),
    sa.Column("bucket", sa.Integer, nullable=False),
    sa.Column("size", sa.Integer, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("state", state_column(MicroBatchState), nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("owner", sa.String(255)),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("crashes", sa.Integer, nullable=False),
    sa.Column("worker_deaths", sa.Integer, nullable=False, server_default="0"),
    # With a server default, as a planner of the version before may write plans.
    sa.Column("isolated", sa.Boolean, nullable=False, server_default=sa.false()),
    # The model that it was planned for: only its workers may claim it. "" means that the planner,
    # of an older version, did not name it.
    sa.Column("fingerprint", sa.String(64), nullable=False, server_default=sa.text("''")),
    # Of a single call. With a server default, as a planner of the version before may write plans.
    sa.Column("live", sa.Boolean, nullable=False, server_default=sa.false()),
    # Computed tokens that are not in its tenant's share yet; null: none.
    sa.Column("uncharged", sa.BigInteger),
    # For reports; no decision rests on them. Null: of the version before, or not yet.
    sa.Column("planned_at", UtcDateTime),
    sa.Column("leased_at", UtcDateTime),  # the latest claim
    sa.Column("ended_at", UtcDateTime),
    sa.Column("tally", sa.Text),  # of its results, as jobs/tallies.py writes it
    # For dispatching: the ready ones, oldest job first. For counting: the states of one job.
    sa.Index(None, "state", "job_id", "id"),
    # For dispatching: reads the ready micro-batches of one model only.
    sa.Index(
        "ix_micro_batch_ready",
        "fingerprint",
        "job_id",
        "id",
        sqlite_where=READY_ALONE,
        postgresql_where=READY_ALONE,
    ),
    # Dispatching: suspects before the rest.
    sa.Index(
        "ix_micro_batch_suspects",
        "fingerprint",
        "job_id",
        "id",
        sqlite_where=READY_SUSPECTS,
        postgresql_where=READY_SUSPECTS,
    ),
    # Dispatching: single calls before everything else.
    sa.Index(
        "ix_micro_batch_live",
        "fingerprint",
        "id",
        sqlite_where=READY_LIVE,
        postgresql_where=READY_LIVE,
    ),
    # For signs of life: the leases of a worker, and who holds leases. An owner has leased it.
    sa.Index("ix_micro_batch_owner", "owner", sqlite_where=OWNED, postgresql_where=OWNED),
    # For purging: the databases look here for micro-batches of a job that is deleted.
    sa.Index(None, "job_id"),
    # For shares: what has ended since the last charge.
    sa.Index(
        "ix_micro_batch_uncharged",
        "fingerprint",
        "id",
        sqlite_where=UNCHARGED,
        postgresql_where=UNCHARGED,
    ),
    postgresql_with=storage.PASSING,
)

# For queries that name an owner: as above, spelt so that they read the index of owners. The index
# of states leads to the leases of every worker.
IS_LEASED = sa.text("micro_batch.state || '' = 'leased'")

request = sa.Table(
    "request",
    metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("job_id", sa.ForeignKey("job.id"), nullable=False),
    sa.Column("row_index", sa.BigInteger, nullable=False),
    sa.Column("line", sa.BigInteger, nullable=False),
    sa.Column("custom_id", sa.Text),
    sa.Column("kind", state_column(RequestKind)),  # null: rejected at submission
    # Only of rows that an API of two versions before has submitted.
    sa.Column("body", sa.Text),
    sa.Column("state", state_column(RequestState), nullable=False),
    sa.Column("micro_batch_id", sa.ForeignKey("micro_batch.id")),
    # What a planner of two versions before has written; see `micro_batch_tokens`.
    sa.Column("segments", sa.LargeBinary),
    sa.Column("prompt_vector", sa.Text),  # "name@version": save_plan writes it, claim returns it
    sa.Column("adapter", sa.Text),  # the same of a LoRA adapter
    sa.Column("leader_id", BigId),  # the equal request whose outcome it shares
    sa.UniqueConstraint("job_id", "row_index"),
    # Not of rejected rows: they may repeat a custom_id, which may be why they are rejected.
    sa.Index(
        "uq_request_job_id_custom_id",
        "job_id",
        "custom_id",
        unique=True,
        sqlite_where=sa.text("kind IS NOT NULL"),
        postgresql_where=sa.text("kind IS NOT NULL"),
    ),
    # SQLite looks here for requests of a micro-batch that is deleted.
    sa.Index("ix_request_micro_batch_id", "micro_batch_id").ddl_if(dialect="sqlite"),
    # For landing: empty unless a job has equal requests.
    sa.Index(
        "ix_request_following",
        "job_id",
        "leader_id",
        sqlite_where=sa.text("leader_id IS NOT NULL"),
        postgresql_where=sa.text("leader_id IS NOT NULL"),
    ),
    postgresql_with=storage.REQUESTS,
)

# What the rows of a job ask for: consecutive rows in one pack. Each state of a request is a new
# version of its row in PostgreSQL, with all of its columns, so the largest one is apart.
body_pack = sa.Table(
    "body_pack",
    metadata,
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("first_row", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("part", sa.BigInteger, nullable=False),  # as `part_of_job` says it
    sa.Column("rows", sa.Integer, nullable=False),
    sa.Column("bytes", sa.BigInteger, nullable=False),  # before compression
    sa.Column("packed", sa.LargeBinary, nullable=False),  # a text is empty: its row has no body
    postgresql_with=storage.KEPT,
)

# The body of a row alone: of single calls, and of jobs of the version before. No foreign key: it
# would be checked for each row.
request_body = sa.Table(
    "request_body",
    metadata,
    sa.Column("request_id", BigId, primary_key=True, autoincrement=False),
    sa.Column("body", sa.Text, nullable=False),
    postgresql_with=storage.KEPT,
)

# The token ids of a micro-batch's requests, until it ends. One that ended by a crash keeps them, as
# it may be tried again.
micro_batch_tokens = sa.Table(
    "micro_batch_tokens",
    metadata,
    sa.Column(
        "micro_batch_id",
        sa.ForeignKey("micro_batch.id", ondelete="CASCADE"),
        primary_key=True,
        autoincrement=False,
    ),
    sa.Column("token_ids", sa.LargeBinary, nullable=False),
    # A pack of what workers need of the bodies, in the order of the requests in `token_ids`. Null:
    # they read the bodies.
    sa.Column("asked", sa.LargeBinary),
    postgresql_with=storage.SOON_DELETED,
)

result = sa.Table(
    "result",
    metadata,
    sa.Column("request_id", sa.ForeignKey("request.id"), primary_key=True, autoincrement=False),
    # The request's job and row again, so that paging needs one index and no join.
    sa.Column("job_id", sa.String(64), nullable=False),
    sa.Column("row_index", sa.BigInteger, nullable=False),
    sa.Column("status_code", sa.Integer, nullable=False),
    sa.Column("body", sa.Text),  # null also where it is in a pack
    sa.Column("error_code", sa.String(64)),
    sa.Column("error_message", sa.Text),
    sa.Column("error_param", sa.Text),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("requested_tokens", sa.BigInteger, nullable=False),
    sa.Column("saved_tokens", sa.BigInteger, nullable=False),
    sa.Column("finish_reason", sa.String(32)),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("reused", state_column(Reuse)),  # null: computed for this request
    sa.Column("landing", sa.BigInteger),  # token of its landing; null: of the version before
    # Of a body in a pack: the pack, its place there, and its length in bytes.
    sa.Column("pack_id", BigId),
    sa.Column("pack_place", sa.SmallInteger),
    sa.Column("body_bytes", sa.BigInteger),
    sa.Index(None, "job_id", "row_index"),
    # Failures are few: this finds them without a scan of the successes.
    sa.Index(
        "ix_result_failures",
        "job_id",
        "row_index",
        sqlite_where=sa.text("error_code IS NOT NULL"),
        postgresql_where=sa.text("error_code IS NOT NULL"),
    ),
    postgresql_with=storage.KEPT,
)

# Bodies of answers that landed together.
answer_pack = sa.Table(
    "answer_pack",
    metadata,
    # The lowest request whose answer is in it. A request has one answer, so the id is unique.
    sa.Column("id", BigId, primary_key=True, autoincrement=False),
    sa.Column("packed", sa.LargeBinary, nullable=False),
    postgresql_with=storage.KEPT,
)

# Results in the order in which their transactions committed, one row a transaction.
landing = sa.Table(
    "landing",
    metadata,
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("first", sa.BigInteger, primary_key=True, autoincrement=False),  # position, from 0
    # Random. A result that landed again after a retry has the token of its new landing.
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("request_ids", sa.LargeBinary, nullable=False),  # 8 bytes each, little-endian
    postgresql_with=storage.KEPT,
)

# The row of an ended worker stays: its seconds still count.
worker = sa.Table(
    "worker",
    metadata,
    sa.Column("owner", sa.String(255), primary_key=True),
    sa.Column("counter", sa.BigInteger, nullable=False),
    sa.Column("seen_at", UtcDateTime, nullable=False),  # for people; no decision rests on it
    # With server defaults, as a worker of the version before may write heartbeats.
    sa.Column("engine_s", sa.Double, nullable=False, server_default="0"),
    sa.Column("load_s", sa.Double, nullable=False, server_default="0"),
    # JSON, for people: what a GPU worker does now. Null: it says nothing of that.
    sa.Column("status", sa.Text),
    postgresql_with=storage.COUNTERS,
)

# Which of several processes does a work that only one should do.
# A planner's sign of life, and the settings that its plans follow from.
planner = sa.Table(
    "planner",
    metadata,
    sa.Column("owner", sa.String(255), primary_key=True),
    sa.Column("counter", sa.BigInteger, nullable=False),
    sa.Column("plans_with", sa.Text, nullable=False),
)

# Rows of a job that a planner plans now: other planners leave them out.
planning_range = sa.Table(
    "planning_range",
    metadata,
    sa.Column("job_id", sa.ForeignKey("job.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("first", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("end", sa.BigInteger, nullable=False),  # the row after the last
    sa.Column("owner", sa.String(255), nullable=False, index=True),
)

leader = sa.Table(
    "leader",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(255)),  # null: it has resigned
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("counter", sa.BigInteger, nullable=False),
    # What the leader can do. Leaders of earlier versions do not write it, so it counts only if
    # it was written in the epoch that is.
    sa.Column("protocol", sa.Integer),
    sa.Column("protocol_epoch", sa.Integer),
    postgresql_with=storage.COUNTERS,
)

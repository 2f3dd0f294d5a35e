"""The tables: one set for SQLite and PostgreSQL.

JSON is kept as text: the store writes and reads it once, and neither database
has to parse it. Token ids are packed bytes (jobs/store/segments.py).
"""

from datetime import UTC, datetime
from enum import StrEnum

import sqlalchemy as sa
from sqlalchemy.engine import Dialect

from nightjar.jobs.records import JobState, MicroBatchState, RequestKind, RequestState, Reuse

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers rows by itself only for a column of type INTEGER.
BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


class UtcDateTime(sa.TypeDecorator[datetime]):
    """A moment in UTC; SQLite forgets the zone, so it is put back on reading."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """The moment in UTC, whatever zone it came in."""
        return value if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """The moment with its zone."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _state(kind: type[StrEnum]) -> sa.Enum:
    """A state as text: a new state needs no migration, and SQL shells show it readably."""
    return sa.Enum(
        kind,
        native_enum=False,
        create_constraint=False,
        length=32,
        values_callable=lambda members: [member.value for member in members],
    )


job = sa.Table(
    "job",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),  # sorts by creation
    sa.Column("state", _state(JobState), nullable=False, index=True),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("idempotency_key", sa.String(255), unique=True),
    sa.Column("metadata", sa.Text, nullable=False),
    sa.Column("cancel_requested", sa.Boolean, nullable=False),
    # By its deadline. A default of the database: an API of the version before may still submit.
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
    # Whose is earlier goes first: the creation, less what the priority is worth.
    sa.Column("rank_at", UtcDateTime),
    sa.Column("reused", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("reused_tokens", sa.BigInteger, nullable=False, server_default="0"),
    # Places given in the order of landing, and how many of them a retry has emptied.
    sa.Column("landed", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("taken_back", sa.BigInteger, nullable=False, server_default="0"),
    # Of the rows and parameters, beside an idempotency key.
    sa.Column("submission_digest", sa.String(64)),
    # Chunks that could not be planned since one could, and why not the last.
    sa.Column("plan_failures", sa.Integer, nullable=False, server_default="0"),
    sa.Column("plan_error", sa.Text),
)

# The condition of ix_micro_batch_ready, spelt so that no other index seems to serve it: SQLite
# would rather read everything that is ready by its state.
READY_ALONE = sa.text("state || '' = 'ready'")
READY_SUSPECTS = sa.text("state || '' = 'ready' AND isolated")

micro_batch = sa.Table(
    "micro_batch",
    metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("job_id", sa.ForeignKey("job.id"), nullable=False),
    sa.Column("kind", _state(RequestKind), nullable=False),
    sa.Column("bucket", sa.Integer, nullable=False),
    sa.Column("size", sa.Integer, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("state", _state(MicroBatchState), nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("owner", sa.String(255)),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("crashes", sa.Integer, nullable=False),
    sa.Column("worker_deaths", sa.Integer, nullable=False, server_default="0"),
    # A default of the database: a planner of the version before may still write its plans.
    sa.Column("isolated", sa.Boolean, nullable=False, server_default=sa.false()),
    # Of the model that it was planned for: no worker of another model may claim it. "": planned by
    # a version that did not say so.
    sa.Column("fingerprint", sa.String(64), nullable=False, server_default=sa.text("''")),
    # Dispatching: the ready ones, oldest job first; counting: the states of one job.
    sa.Index(None, "state", "job_id", "id"),
    # Dispatching for one model: the ready ones of others are not read.
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
)

# What may wait for planning: a row in no micro-batch that follows no other, unless the planner
# refused it or knew its answer, which leaves it without tokens. Not by its state: PostgreSQL writes
# a row's new version beside the old one, and into no index, where no column changes that an index
# or its condition names. Ending changes the state alone.
UNPLANNED = sa.text(
    "micro_batch_id IS NULL AND leader_id IS NULL AND kind IS NOT NULL"
    " AND (segments IS NULL OR length(segments) > 0)"
)
NO_TOKENS = b""

request = sa.Table(
    "request",
    metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("job_id", sa.ForeignKey("job.id"), nullable=False),
    sa.Column("row_index", sa.BigInteger, nullable=False),
    sa.Column("line", sa.BigInteger, nullable=False),
    sa.Column("custom_id", sa.Text),
    sa.Column("kind", _state(RequestKind)),  # null: rejected at submission
    sa.Column("body", sa.Text),
    sa.Column("state", _state(RequestState), nullable=False),
    sa.Column("micro_batch_id", sa.ForeignKey("micro_batch.id"), index=True),
    sa.Column("segments", sa.LargeBinary),
    sa.Column("prompt_vector", sa.Text),  # "name@version": save_plan writes it, claim returns it
    sa.Column("leader_id", BigId),  # the equal request that is computed in its place
    sa.UniqueConstraint("job_id", "row_index"),
    # Rejected rows may repeat a custom_id: the repetition is why they are rejected.
    sa.Index(
        "uq_request_job_id_custom_id",
        "job_id",
        "custom_id",
        unique=True,
        sqlite_where=sa.text("kind IS NOT NULL"),
        postgresql_where=sa.text("kind IS NOT NULL"),
    ),
    # Planning: holds the backlog alone, so that it stays small and cheap to keep.
    sa.Index(
        "ix_request_unplanned",
        "job_id",
        "row_index",
        sqlite_where=UNPLANNED,
        postgresql_where=UNPLANNED,
    ),
    # Landing: empty unless a job has equal requests.
    sa.Index(
        "ix_request_following",
        "job_id",
        "leader_id",
        sqlite_where=sa.text("leader_id IS NOT NULL"),
        postgresql_where=sa.text("leader_id IS NOT NULL"),
    ),
    # Room in each page for the new version of a row that ends.
    postgresql_with={"fillfactor": 75},
)

result = sa.Table(
    "result",
    metadata,
    sa.Column("request_id", sa.ForeignKey("request.id"), primary_key=True, autoincrement=False),
    # The request's job and row, once more, so that paging needs one index and no join.
    sa.Column("job_id", sa.String(64), nullable=False),
    sa.Column("row_index", sa.BigInteger, nullable=False),
    sa.Column("status_code", sa.Integer, nullable=False),
    sa.Column("body", sa.Text),
    sa.Column("error_code", sa.String(64)),
    sa.Column("error_message", sa.Text),
    sa.Column("error_param", sa.Text),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Column("requested_tokens", sa.BigInteger, nullable=False),
    sa.Column("saved_tokens", sa.BigInteger, nullable=False),
    sa.Column("finish_reason", sa.String(32)),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("reused", _state(Reuse)),  # null: computed for this request
    sa.Column("landing", sa.BigInteger),  # token of its landing; null: of the version before
    sa.Index(None, "job_id", "row_index"),
    # Failures are few: this finds them without a walk over the successes.
    sa.Index(
        "ix_result_failures",
        "job_id",
        "row_index",
        sqlite_where=sa.text("error_code IS NOT NULL"),
        postgresql_where=sa.text("error_code IS NOT NULL"),
    ),
)

# Results in the order in which their transactions committed, one row a transaction.
landing = sa.Table(
    "landing",
    metadata,
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("first", sa.BigInteger, primary_key=True, autoincrement=False),  # place, from 0
    # Random. A result that was retried has another landing's token, and is shown there alone.
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("request_ids", sa.LargeBinary, nullable=False),  # 8 bytes each, little-endian
)

# Answers kept for equal requests to come; ids rise with age, the oldest leave.
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

# How likely documents are after queries, kept for rankings to come.
cached_score = sa.Table(
    "cached_score",
    metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("key", sa.String(64), nullable=False, unique=True),
    sa.Column("mean_nll", sa.Double, nullable=False),
    sa.Column("token_count", sa.BigInteger, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
)

# The row of a worker that has ended stays: its seconds count.
worker = sa.Table(
    "worker",
    metadata,
    sa.Column("owner", sa.String(255), primary_key=True),
    sa.Column("counter", sa.BigInteger, nullable=False),
    sa.Column("seen_at", UtcDateTime, nullable=False),  # for people; no decision rests on it
    # Defaults of the database: a worker of the version before may still write its beats.
    sa.Column("engine_s", sa.Double, nullable=False, server_default="0"),
    sa.Column("load_s", sa.Double, nullable=False, server_default="0"),
)

# Of processes that could do the same, the one that does.
leader = sa.Table(
    "leader",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(255)),  # null: it has resigned
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("counter", sa.BigInteger, nullable=False),
)

prompt_vector = sa.Table(
    "prompt_vector",
    metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("length", sa.Integer, nullable=False),
    sa.Column("width", sa.Integer, nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.UniqueConstraint("name", "version"),
)

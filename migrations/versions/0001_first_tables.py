"""The first tables: job, micro_batch, request, result, worker, prompt_vector."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
STATE = sa.String(32)


def _moment(name: str, *, nullable: bool) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _counter(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


def upgrade() -> None:
    _create_job()
    _create_micro_batch()
    _create_request()
    _create_result()
    _create_worker_and_vectors()


def downgrade() -> None:
    for table in ("prompt_vector", "worker", "result", "request", "micro_batch", "job"):
        op.drop_table(table)


def _create_job() -> None:
    op.create_table(
        "job",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("state", STATE, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("metadata", sa.Text, nullable=False),
        sa.Column("cancel_requested", sa.Boolean, nullable=False),
        _counter("total"),
        _counter("completed"),
        _counter("failed"),
        _counter("cancelled"),
        _counter("prompt_tokens"),
        _counter("completion_tokens"),
        _counter("requested_tokens"),
        _counter("saved_tokens"),
        _moment("created_at", nullable=False),
        _moment("started_at", nullable=True),
        _moment("finished_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_job"),
        sa.UniqueConstraint("idempotency_key", name="uq_job_idempotency_key"),
    )
    op.create_index("ix_job_state", "job", ["state"])


def _create_micro_batch() -> None:
    op.create_table(
        "micro_batch",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("kind", STATE, nullable=False),
        sa.Column("bucket", sa.Integer, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
        _counter("tokens"),
        sa.Column("state", STATE, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("owner", sa.String(255)),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("crashes", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_micro_batch"),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name="fk_micro_batch_job_id"),
    )
    op.create_index("ix_micro_batch_state_job_id_id", "micro_batch", ["state", "job_id", "id"])


def _create_request() -> None:
    op.create_table(
        "request",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        _counter("row_index"),
        _counter("line"),
        sa.Column("custom_id", sa.Text),
        sa.Column("kind", STATE),
        sa.Column("body", sa.Text),
        sa.Column("state", STATE, nullable=False),
        sa.Column("micro_batch_id", BIG_ID),
        sa.Column("segments", sa.LargeBinary),
        sa.Column("prompt_vector", sa.Text),
        sa.PrimaryKeyConstraint("id", name="pk_request"),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name="fk_request_job_id"),
        sa.ForeignKeyConstraint(
            ["micro_batch_id"], ["micro_batch.id"], name="fk_request_micro_batch_id"
        ),
        sa.UniqueConstraint("job_id", "row_index", name="uq_request_job_id_row_index"),
    )
    op.create_index("ix_request_micro_batch_id", "request", ["micro_batch_id"])
    accepted = sa.text("kind IS NOT NULL")
    op.create_index(
        "uq_request_job_id_custom_id",
        "request",
        ["job_id", "custom_id"],
        unique=True,
        sqlite_where=accepted,
        postgresql_where=accepted,
    )
    queued = sa.text("state = 'queued'")
    op.create_index(
        "ix_request_queued",
        "request",
        ["job_id", "row_index"],
        sqlite_where=queued,
        postgresql_where=queued,
    )


def _create_result() -> None:
    op.create_table(
        "result",
        sa.Column("request_id", BIG_ID, nullable=False, autoincrement=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        _counter("row_index"),
        sa.Column("status_code", sa.Integer, nullable=False),
        sa.Column("body", sa.Text),
        sa.Column("error_code", sa.String(64)),
        sa.Column("error_message", sa.Text),
        sa.Column("error_param", sa.Text),
        _counter("prompt_tokens"),
        _counter("completion_tokens"),
        _counter("requested_tokens"),
        _counter("saved_tokens"),
        sa.Column("finish_reason", sa.String(32)),
        _moment("created_at", nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_result"),
        sa.ForeignKeyConstraint(["request_id"], ["request.id"], name="fk_result_request_id"),
    )
    op.create_index("ix_result_job_id_row_index", "result", ["job_id", "row_index"])
    failed = sa.text("error_code IS NOT NULL")
    op.create_index(
        "ix_result_failures",
        "result",
        ["job_id", "row_index"],
        sqlite_where=failed,
        postgresql_where=failed,
    )


def _create_worker_and_vectors() -> None:
    op.create_table(
        "worker",
        sa.Column("owner", sa.String(255), nullable=False),
        _counter("counter"),
        _moment("seen_at", nullable=False),
        sa.PrimaryKeyConstraint("owner", name="pk_worker"),
    )
    op.create_table(
        "prompt_vector",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("length", sa.Integer, nullable=False),
        sa.Column("width", sa.Integer, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        _moment("created_at", nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_prompt_vector"),
        sa.UniqueConstraint("name", "version", name="uq_prompt_vector_name_version"),
    )

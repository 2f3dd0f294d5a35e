"""Schedules, their runs and their changes."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0032"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True)
_DUE = sa.text("NOT paused AND next_at IS NOT NULL")
_OPEN = sa.text("ended_at IS NULL")
_CANCELS = sa.text("cancels_job")


def upgrade() -> None:
    _schedules()
    _runs()
    op.create_table(
        "schedule_change",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("schedule_id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("at", _Moment, nullable=False),
        sa.Column("actor", sa.String(255), nullable=False),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("before", sa.Text, nullable=False),
        sa.Column("after", sa.Text, nullable=False),
        if_not_exists=True,
    )
    # The tables are new and empty: a plain build blocks nobody.
    for name, table, columns, unique, where in (
        ("ix_schedule_tenant_name", "schedule", ["tenant", "name"], True, None),
        ("ix_schedule_tenant_id", "schedule", ["tenant", "id"], False, None),
        ("ix_schedule_due", "schedule", ["next_at"], False, _DUE),
        (
            "ix_schedule_run_schedule_id_planned_at",
            "schedule_run",
            ["schedule_id", "planned_at"],
            True,
            None,
        ),
        ("ix_schedule_run_schedule_id_id", "schedule_run", ["schedule_id", "id"], False, None),
        ("ix_schedule_run_open", "schedule_run", ["begin_at"], False, _OPEN),
        ("ix_schedule_run_cancels", "schedule_run", ["id"], False, _CANCELS),
        ("ix_schedule_change_tenant_id", "schedule_change", ["tenant", "id"], False, None),
        (
            "ix_schedule_change_schedule_id_id",
            "schedule_change",
            ["schedule_id", "id"],
            False,
            None,
        ),
    ):
        op.create_index(
            name,
            table,
            columns,
            unique=unique,
            sqlite_where=where,
            postgresql_where=where,
            if_not_exists=True,
        )


def _schedules() -> None:
    op.create_table(
        "schedule",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("cron", sa.String(100), nullable=False),
        sa.Column("time_zone", sa.String(64), nullable=False),
        sa.Column("task_name", sa.String(255)),
        sa.Column("task_path", sa.Text),
        sa.Column("file_id", sa.String(64)),
        sa.Column("endpoint", sa.String(64)),
        sa.Column("model", sa.Text),
        sa.Column("when_still_running", sa.String(32), nullable=False),
        sa.Column("catch_up", sa.Boolean, nullable=False),
        sa.Column("jitter_s", sa.Integer, nullable=False),
        sa.Column("deadline_s", sa.Integer, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("keep_results_s", sa.BigInteger),
        sa.Column("source", sa.Text),
        sa.Column("paused", sa.Boolean, nullable=False),
        sa.Column("next_at", _Moment),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("task_digest", sa.String(64)),
        sa.Column("created_at", _Moment, nullable=False),
        sa.Column("changed_at", _Moment, nullable=False),
        if_not_exists=True,
    )


def _runs() -> None:
    op.create_table(
        "schedule_run",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column(
            "schedule_id",
            sa.String(64),
            sa.ForeignKey("schedule.id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("planned_at", _Moment, nullable=False),
        sa.Column("begin_at", _Moment, nullable=False),
        sa.Column("deadline_at", _Moment, nullable=False),
        sa.Column("trigger", sa.String(32), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("missed", sa.Integer, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("retry_at", _Moment),
        sa.Column("owner", sa.Text),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("beats", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("job_id", sa.String(64)),
        sa.Column("task", sa.Text),
        sa.Column("total", sa.BigInteger, nullable=False),
        sa.Column("completed", sa.BigInteger, nullable=False),
        sa.Column("failed", sa.BigInteger, nullable=False),
        sa.Column("cancels_job", sa.Boolean, nullable=False),
        sa.Column("created_at", _Moment, nullable=False),
        sa.Column("started_at", _Moment),
        sa.Column("ended_at", _Moment),
        if_not_exists=True,
    )


def downgrade() -> None:
    op.drop_table("schedule_change")
    op.drop_table("schedule_run")
    op.drop_table("schedule")

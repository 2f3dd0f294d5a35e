"""Tables of schedules, their runs and their changes."""

import sqlalchemy as sa

from nightjar.jobs.schedule_records import ChangeAction, RunState, Trigger, WhenRunning
from nightjar.jobs.store.columns import UtcDateTime, metadata, state_column

schedule = sa.Table(
    "schedule",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),  # sorts by creation
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column("cron", sa.String(100), nullable=False),
    sa.Column("time_zone", sa.String(64), nullable=False),
    # Exactly one of these three. A path comes from the operator's command, never from the API.
    sa.Column("task_name", sa.String(255)),
    sa.Column("task_path", sa.Text),
    sa.Column("file_id", sa.String(64)),
    sa.Column("endpoint", sa.String(64)),
    sa.Column("model", sa.Text),
    sa.Column("when_still_running", state_column(WhenRunning), nullable=False),
    sa.Column("catch_up", sa.Boolean, nullable=False),
    sa.Column("jitter_s", sa.Integer, nullable=False),
    sa.Column("deadline_s", sa.Integer, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("keep_results_s", sa.BigInteger),
    sa.Column("source", sa.Text),  # the schedule file that it comes from
    sa.Column("paused", sa.Boolean, nullable=False),
    sa.Column("next_at", UtcDateTime),
    sa.Column("failures", sa.Integer, nullable=False),  # runs in a row
    sa.Column("task_digest", sa.String(64)),  # of the task file, as the last run found it
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("changed_at", UtcDateTime, nullable=False),
    sa.Index(None, "tenant", "name", unique=True),
    sa.Index(None, "tenant", "id"),
    # For the planner: what is due.
    sa.Index(
        "ix_schedule_due",
        "next_at",
        sqlite_where=sa.text("NOT paused AND next_at IS NOT NULL"),
        postgresql_where=sa.text("NOT paused AND next_at IS NOT NULL"),
    ),
)

schedule_run = sa.Table(
    "schedule_run",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),  # sorts by creation
    sa.Column("schedule_id", sa.ForeignKey("schedule.id", ondelete="CASCADE"), nullable=False),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("planned_at", UtcDateTime, nullable=False),
    sa.Column("begin_at", UtcDateTime, nullable=False),
    sa.Column("deadline_at", UtcDateTime, nullable=False),
    sa.Column("trigger", state_column(Trigger), nullable=False),
    sa.Column("state", state_column(RunState), nullable=False),
    sa.Column("missed", sa.Integer, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),  # of the present step
    sa.Column("retry_at", UtcDateTime),
    # The claim of a process: its name, a number that fences it, a counter that rises as it lives.
    sa.Column("owner", sa.Text),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("beats", sa.BigInteger, nullable=False),
    sa.Column("reason", sa.Text),
    sa.Column("job_id", sa.String(64)),
    sa.Column("task", sa.Text),  # the task as its rows were read, as JSON
    sa.Column("total", sa.BigInteger, nullable=False),
    sa.Column("completed", sa.BigInteger, nullable=False),
    sa.Column("failed", sa.BigInteger, nullable=False),
    sa.Column("cancels_job", sa.Boolean, nullable=False),  # its job is still to be cancelled
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("started_at", UtcDateTime),
    sa.Column("ended_at", UtcDateTime),
    # A planned time runs once, whoever finds that it has come.
    sa.Index(None, "schedule_id", "planned_at", unique=True),
    sa.Index(None, "schedule_id", "id"),
    sa.Index(
        "ix_schedule_run_open",
        "begin_at",
        sqlite_where=sa.text("ended_at IS NULL"),
        postgresql_where=sa.text("ended_at IS NULL"),
    ),
    sa.Index(
        "ix_schedule_run_cancels",
        "id",
        sqlite_where=sa.text("cancels_job"),
        postgresql_where=sa.text("cancels_job"),
    ),
)

# Signs of life of `nightjar worker tasks`.
task_runner = sa.Table(
    "task_runner",
    metadata,
    sa.Column("owner", sa.String(255), primary_key=True),
    sa.Column("counter", sa.BigInteger, nullable=False),
    sa.Column("seen_at", UtcDateTime, nullable=False),
)

# Outlives its schedule: who deleted one can be found out, too.
schedule_change = sa.Table(
    "schedule_change",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),  # sorts by creation
    sa.Column("schedule_id", sa.String(64), nullable=False),
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("name", sa.String(64), nullable=False),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.Column("actor", sa.String(255), nullable=False),
    sa.Column("action", state_column(ChangeAction), nullable=False),
    sa.Column("before", sa.Text, nullable=False),  # the fields that differ, as JSON
    sa.Column("after", sa.Text, nullable=False),
    sa.Index(None, "tenant", "id"),
    sa.Index(None, "schedule_id", "id"),
)

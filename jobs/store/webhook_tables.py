"""Tables of webhooks and of what is delivered to them."""

import sqlalchemy as sa

from nightjar.jobs.events import DeliveryState
from nightjar.jobs.store.columns import UtcDateTime, metadata, state_column

webhook = sa.Table(
    "webhook",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),  # sorts by creation
    sa.Column("tenant", sa.String(64), nullable=False),
    sa.Column("url", sa.Text, nullable=False),
    # In clear: each delivery is signed with it.
    sa.Column("secret", sa.Text, nullable=False),
    sa.Column("events", sa.Text, nullable=False),  # a list in JSON; empty: all
    sa.Column("enabled", sa.Boolean, nullable=False),
    sa.Column("disabled_reason", sa.Text),
    sa.Column("created_at", UtcDateTime, nullable=False),
    # For listings, and for the end of a job.
    sa.Index(None, "tenant", "id"),
)

# A job's end writes its rows in its own transaction, one for each webhook of its tenant.
webhook_delivery = sa.Table(
    "webhook_delivery",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),  # sorts by creation
    sa.Column("webhook_id", sa.ForeignKey("webhook.id", ondelete="CASCADE"), nullable=False),
    sa.Column("event_id", sa.String(64), nullable=False),
    sa.Column("type", sa.String(32), nullable=False),
    sa.Column("job_id", sa.String(64), nullable=False),
    sa.Column("body", sa.Text, nullable=False),  # what is sent and signed, byte for byte
    sa.Column("state", state_column(DeliveryState), nullable=False),
    sa.Column("attempts", sa.BigInteger, nullable=False),
    # Of the attempts since it was made, or was redelivered by hand.
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("next_at", UtcDateTime),  # null unless it waits
    sa.Column("last_status", sa.Integer),
    sa.Column("last_reason", sa.Text),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("attempted_at", UtcDateTime),
    sa.Column("ended_at", UtcDateTime),
    sa.Index(None, "webhook_id", "id"),
    # For sending: holds only what waits.
    sa.Index(
        "ix_webhook_delivery_waiting",
        "webhook_id",
        "next_at",
        sqlite_where=sa.text("next_at IS NOT NULL"),
        postgresql_where=sa.text("next_at IS NOT NULL"),
    ),
)

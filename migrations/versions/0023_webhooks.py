"""Webhooks of tenants, and the deliveries to them."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

_Moment = sa.DateTime(timezone=True)
_WAITING = sa.text("next_at IS NOT NULL")


def upgrade() -> None:
    op.create_table(
        "webhook",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("secret", sa.Text, nullable=False),
        sa.Column("events", sa.Text, nullable=False),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("disabled_reason", sa.Text),
        sa.Column("created_at", _Moment, nullable=False),
        if_not_exists=True,
    )
    op.create_index("ix_webhook_tenant_id", "webhook", ["tenant", "id"], if_not_exists=True)
    op.create_table(
        "webhook_delivery",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column(
            "webhook_id",
            sa.String(64),
            sa.ForeignKey("webhook.id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("event_id", sa.String(64), nullable=False),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("next_at", _Moment),
        sa.Column("last_status", sa.Integer),
        sa.Column("last_reason", sa.Text),
        sa.Column("created_at", _Moment, nullable=False),
        sa.Column("attempted_at", _Moment),
        sa.Column("ended_at", _Moment),
        if_not_exists=True,
    )
    # The tables are new and empty: a plain build blocks nobody.
    for name, columns, where in (
        ("ix_webhook_delivery_webhook_id_id", ["webhook_id", "id"], None),
        ("ix_webhook_delivery_waiting", ["webhook_id", "next_at"], _WAITING),
    ):
        op.create_index(
            name,
            "webhook_delivery",
            columns,
            sqlite_where=where,
            postgresql_where=where,
            if_not_exists=True,
        )


def downgrade() -> None:
    op.drop_table("webhook_delivery")
    op.drop_table("webhook")

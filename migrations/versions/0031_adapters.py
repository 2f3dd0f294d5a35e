"""LoRA adapters beside prompt vectors: what is registered, and what a request is planned with."""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    kind = sa.Column("kind", sa.String(16), nullable=False, server_default="vectors")
    op.add_column("prompt_vector", kind)
    op.add_column("request", sa.Column("adapter", sa.Text))


def downgrade() -> None:
    op.drop_column("request", "adapter")
    op.drop_column("prompt_vector", "kind")

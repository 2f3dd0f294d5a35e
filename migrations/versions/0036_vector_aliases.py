"""Aliases of prompt vectors, the model they are for, and the versions that jobs keep."""

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("prompt_vector", sa.Column("fingerprint", sa.String(64)))
    op.create_table(
        "prompt_vector_alias",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("alias", sa.String(64), primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
    )
    op.create_table(
        "job_prompt_vector",
        sa.Column("job_id", sa.String(64), sa.ForeignKey("job.id"), primary_key=True),
        sa.Column("reference", sa.String(255), primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
    )
    op.execute(
        "INSERT INTO prompt_vector_alias (name, alias, version) "
        "SELECT name, 'latest', max(version) FROM prompt_vector GROUP BY name"
    )


def downgrade() -> None:
    op.drop_table("job_prompt_vector")
    op.drop_table("prompt_vector_alias")
    op.drop_column("prompt_vector", "fingerprint")

"""Tables of prompt vectors and LoRA adapters, their aliases, and the versions that jobs keep."""

import sqlalchemy as sa

from nightjar.jobs.store.columns import BigId, UtcDateTime, metadata

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
    sa.Column("fingerprint", sa.String(64)),  # of the model they were trained for, where known
    sa.Column("kind", sa.String(16), nullable=False, server_default="vectors"),  # or "lora"
    sa.UniqueConstraint("name", "version"),
)

# Every name has the alias `latest`. An alias is one version of its name.
prompt_vector_alias = sa.Table(
    "prompt_vector_alias",
    metadata,
    sa.Column("name", sa.String(255), primary_key=True),
    sa.Column("alias", sa.String(64), primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
)

# The version that each reference of a job meant when the job was first planned with it.
job_prompt_vector = sa.Table(
    "job_prompt_vector",
    metadata,
    sa.Column("job_id", sa.String(64), sa.ForeignKey("job.id"), primary_key=True),
    sa.Column("reference", sa.String(255), primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
)

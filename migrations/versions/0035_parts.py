"""Partitions of requests, bodies and results, so that the rows of a day go without a delete.

PostgreSQL alone. The tables of before become the partition of part 0. Nothing of them is written
anew, and they are locked for a moment only.

An API of the version before cannot submit jobs any more: it relies on a unique index over all
rows, and partitions have one each. Its single calls, and the planners and workers of that version,
go on.
"""

import time

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import is_postgres

revision = "0035"
down_revision = "0039"
branch_labels = None
depends_on = None

_KEYS = {"result": "request_id", "request_body": "request_id", "request": "id"}
_FIRST_DAY = 18_261
_DAY_S = 86_400
# Shorter than the server's deadlock_timeout: this transaction gives way to those of others.
_LOCK_TIMEOUT_MS = 500
_PARTED = "^job_[0-9a-f]{12}p"
_FUNCTION = f"""
CREATE FUNCTION nightjar_part(job_id text) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
SELECT CASE WHEN job_id ~ '{_PARTED}'
  THEN ('x' || substr(job_id, 5, 12))::bit(48)::bigint / {_DAY_S * 1000} - {_FIRST_DAY}
  ELSE 0 END
$$
"""
_INDEXES = sa.text(
    "SELECT i.relname, x.indisunique FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid "
    "WHERE x.indrelid = to_regclass(:name) ORDER BY i.relname"
)
_FOREIGN_KEYS = sa.text(
    "SELECT conname FROM pg_constraint WHERE conrelid = to_regclass(:name) AND contype = 'f'"
)
_DEFINITION = sa.text("SELECT pg_get_indexdef(to_regclass(:name))")
_HAS_CONSTRAINT = sa.text(
    "SELECT 1 FROM pg_constraint WHERE conrelid = to_regclass(:table) AND conname = :name"
)
_PARTITIONS = sa.text(
    "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = to_regclass(:name) "
    "ORDER BY inhrelid"
)


def upgrade() -> None:
    if not is_postgres():
        return
    with op.get_context().autocommit_block():
        for table, key in _KEYS.items():
            _check(table, "part", f"({key} >> 40) IS NOT NULL AND ({key} >> 40) = 0")
        # A process of the version before that appends to a job would put its rows where nobody
        # looks.
        _check("request", "job", f"job_id !~ '{_PARTED}'")
    op.execute(f"SET LOCAL lock_timeout = {_LOCK_TIMEOUT_MS}")
    op.execute("LOCK TABLE job, micro_batch, request, request_body, result")
    op.execute(_FUNCTION)
    for table, key in _KEYS.items():
        _part(table, key)
    op.execute("ALTER SEQUENCE request_id_seq OWNED BY request.id")
    today = int(time.time() // _DAY_S) - _FIRST_DAY
    for part in (today, today + 1):
        for table in _KEYS:
            _add_part(table, part)


def _check(table: str, what: str, condition: str) -> None:
    """Prove that all rows meet a condition, while others read and write; safe to do twice."""
    name = f"ck_{table}_{what}"
    known = {"table": table, "name": name}
    if op.get_bind().execute(_HAS_CONSTRAINT, known).first() is None:
        op.execute(f"ALTER TABLE {table} ADD CONSTRAINT {name} CHECK ({condition}) NOT VALID")
    op.execute(f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}")


def _part(table: str, key: str) -> None:
    """Put a partitioned table in the place of a table, which becomes its first partition.

    Foreign keys go: to drop a partition with some would lock the tables that they name.
    """
    connection, first = op.get_bind(), f"{table}_p0"
    schema = connection.scalar(sa.text("SELECT quote_ident(current_schema())"))
    for name in connection.scalars(_FOREIGN_KEYS, {"name": table}).all():
        op.execute(f"ALTER TABLE {table} DROP CONSTRAINT {name}")
    definitions = []
    for name, is_unique in connection.execute(_INDEXES, {"name": table}).all():
        if not is_unique:
            # Without its schema, which the search path names.
            definition = str(connection.scalar(_DEFINITION, {"name": name}))
            definitions.append(definition.replace(f" ON {schema}.", " ON "))
        op.execute(f"ALTER INDEX {name} RENAME TO {name}_p0")
    op.execute(f"ALTER TABLE {table} RENAME TO {first}")
    op.execute(
        f"CREATE TABLE {table} (LIKE {first} INCLUDING DEFAULTS INCLUDING STORAGE "
        f"INCLUDING COMPRESSION) PARTITION BY LIST (({key} >> 40))"
    )
    op.execute(f"ALTER TABLE {table} ATTACH PARTITION {first} FOR VALUES IN (0)")
    for definition in definitions:  # finds the index of the partition, and builds nothing
        op.execute(definition)


def _add_part(table: str, part: int) -> None:
    options = op.get_bind().scalar(
        sa.text(
            "SELECT array_to_string(reloptions, ', ') FROM pg_class WHERE oid = to_regclass(:name)"
        ),
        {"name": f"{table}_p0"},
    )
    op.execute(
        f"CREATE TABLE {table}_p{part} (LIKE {table}_p0 INCLUDING DEFAULTS INCLUDING INDEXES "
        f"INCLUDING STORAGE INCLUDING COMPRESSION)" + (f" WITH ({options})" if options else "")
    )
    op.execute(f"ALTER TABLE {table} ATTACH PARTITION {table}_p{part} FOR VALUES IN ({part})")


def downgrade() -> None:
    """Put all rows into plain tables again; takes as long as it takes to write them.

    The next upgrade refuses rows that were in other parts than 0: they have to be purged before.
    """
    if not is_postgres():
        return
    connection = op.get_bind()
    op.execute("LOCK TABLE job, micro_batch, request, request_body, result")
    for table in _KEYS:
        first = f"{table}_p0"
        others = [
            name
            for name in connection.scalars(_PARTITIONS, {"name": table}).all()
            if not name.endswith(first)
        ]
        op.execute(f"ALTER TABLE {table} DETACH PARTITION {first}")
        op.execute(f"ALTER TABLE {first} DROP CONSTRAINT ck_{table}_part")
        if table == "request":
            op.execute("ALTER TABLE request_p0 DROP CONSTRAINT ck_request_job")
            op.execute("ALTER SEQUENCE request_id_seq OWNED BY request_p0.id")
        for name in others:
            op.execute(f"INSERT INTO {first} SELECT * FROM {name}")  # noqa: S608
        op.execute(f"DROP TABLE {table}")
        op.execute(f"ALTER TABLE {first} RENAME TO {table}")
        for name, _ in connection.execute(_INDEXES, {"name": table}).all():
            op.execute(f"ALTER INDEX {name} RENAME TO {name.removesuffix('_p0')}")
    op.execute("DROP FUNCTION nightjar_part")
    for table, column, named in (
        ("request", "job_id", "job"),
        ("request", "micro_batch_id", "micro_batch"),
        ("result", "request_id", "request"),
    ):
        op.create_foreign_key(f"fk_{table}_{column}", table, named, [column], ["id"])

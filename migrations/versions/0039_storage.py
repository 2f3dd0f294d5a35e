"""An index of who holds leases; vacuum in time, and room for new versions of rows."""

import sqlalchemy as sa
from alembic import op

from nightjar.migrations.indexes import create_index, drop_index, is_postgres

revision = "0039"
down_revision = "0037"
branch_labels = None
depends_on = None

_COUNTERS = {
    "fillfactor": 50,
    "autovacuum_vacuum_scale_factor": 0.01,
    "autovacuum_vacuum_threshold": 500,
    "autovacuum_vacuum_cost_delay": 0,
}
_PASSING = {
    "autovacuum_vacuum_scale_factor": 0.02,
    "autovacuum_vacuum_threshold": 5000,
    "autovacuum_vacuum_insert_scale_factor": 0.05,
    "autovacuum_vacuum_insert_threshold": 50000,
    "autovacuum_analyze_scale_factor": 0.02,
    "autovacuum_analyze_threshold": 5000,
}
_KEPT = {
    "autovacuum_vacuum_insert_scale_factor": 0.05,
    "autovacuum_vacuum_insert_threshold": 50000,
    "autovacuum_analyze_scale_factor": 0.05,
}
_SOON_DELETED = {
    "autovacuum_vacuum_scale_factor": 0.02,
    "autovacuum_vacuum_threshold": 1000,
    "toast.autovacuum_vacuum_scale_factor": 0.02,
    "toast.autovacuum_vacuum_threshold": 5000,
}
_STORAGE = {
    "job": _COUNTERS,
    "worker": _COUNTERS,
    "leader": _COUNTERS,
    "micro_batch": _PASSING,
    "request": {"fillfactor": 50} | _PASSING,
    "request_body": _KEPT,
    "result": _KEPT,
    "landing": _KEPT,
    "micro_batch_tokens": _SOON_DELETED,
}


def upgrade() -> None:
    if is_postgres():
        # It waits for no reader and no writer, and none waits for it.
        for table, storage in _STORAGE.items():
            words = ", ".join(f"{name} = {value}" for name, value in storage.items())
            op.execute(f"ALTER TABLE {table} SET ({words})")
    create_index("ix_micro_batch_owner", "micro_batch", ["owner"], sa.text("owner IS NOT NULL"))


def downgrade() -> None:
    drop_index("ix_micro_batch_owner", "micro_batch")
    if is_postgres():
        for table, storage in _STORAGE.items():
            op.execute(f"ALTER TABLE {table} RESET ({', '.join(storage)})")
        op.execute("ALTER TABLE request SET (fillfactor = 75)")  # of revision 0009

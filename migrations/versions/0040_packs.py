"""Bodies and answers in packs, and what workers need of bodies beside the token ids.

Rows that are there keep theirs alone. On PostgreSQL packs are in the partitions of their rows.
"""

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
import zstandard
from alembic import op

from nightjar.migrations.indexes import is_postgres

revision = "0040"
down_revision = "0038"
branch_labels = None
depends_on = None

_BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_KEYS = {"body_pack": "part", "answer_pack": "(id >> 40)"}
# As revision 0039 has it for what is inserted and, much later, deleted.
_KEPT = (
    "autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_vacuum_insert_threshold = 50000, "
    "autovacuum_analyze_scale_factor = 0.05"
)
_PARTS = sa.text(
    "SELECT substring(inhrelid::regclass::text FROM '_p([0-9]+)$')::bigint FROM pg_inherits "
    "WHERE inhparent = to_regclass('request') ORDER BY 1"
)
# Shorter than the server's deadlock_timeout: this transaction gives way to those of others.
_LOCK_TIMEOUT_MS = 500
_PACKS_AT_ONCE = 100


def upgrade() -> None:
    if is_postgres():
        op.execute(f"SET LOCAL lock_timeout = {_LOCK_TIMEOUT_MS}")
        op.execute("LOCK TABLE request, result, micro_batch_tokens")
    suffix = "_p0" if is_postgres() else ""
    op.create_table(
        f"body_pack{suffix}",
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("first_row", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("part", sa.BigInteger, nullable=False),
        sa.Column("rows", sa.Integer, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("packed", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        f"answer_pack{suffix}",
        sa.Column("id", _BIG_ID, primary_key=True, autoincrement=False),
        sa.Column("packed", sa.LargeBinary, nullable=False),
    )
    op.add_column("micro_batch_tokens", sa.Column("asked", sa.LargeBinary))
    op.add_column("result", sa.Column("pack_id", _BIG_ID))
    op.add_column("result", sa.Column("pack_place", sa.SmallInteger))
    op.add_column("result", sa.Column("body_bytes", sa.BigInteger))
    if is_postgres():
        # Compressed already: PostgreSQL would try it once more.
        for column in ("token_ids", "asked"):
            op.execute(f"ALTER TABLE micro_batch_tokens ALTER COLUMN {column} SET STORAGE EXTERNAL")
        parts = op.get_bind().scalars(_PARTS).all()
        for table, key in _KEYS.items():
            _part(table, key, parts)


def _part(table: str, key: str, parts: Any) -> None:  # noqa: ANN401
    """Make the partitioned table of a table `_p0`, and the parts that requests have."""
    op.execute(f"ALTER TABLE {table}_p0 SET ({_KEPT})")
    op.execute(f"ALTER TABLE {table}_p0 ALTER COLUMN packed SET STORAGE EXTERNAL")
    op.execute(
        f"CREATE TABLE {table} (LIKE {table}_p0 INCLUDING DEFAULTS INCLUDING STORAGE) "
        f"PARTITION BY LIST ({key})"
    )
    for part in parts:
        if part:
            op.execute(
                f"CREATE TABLE {table}_p{part} (LIKE {table}_p0 INCLUDING DEFAULTS "
                f"INCLUDING INDEXES INCLUDING STORAGE) WITH ({_KEPT})"
            )
        op.execute(f"ALTER TABLE {table} ATTACH PARTITION {table}_p{part} FOR VALUES IN ({part})")


def downgrade() -> None:
    """Give each row its body and its answer alone again; takes as long as to write them."""
    _unpack_bodies()
    _unpack_answers()
    for name in ("pack_id", "pack_place", "body_bytes"):
        op.drop_column("result", name)
    op.drop_column("micro_batch_tokens", "asked")
    for table in _KEYS:
        op.drop_table(table)


def _unpack_bodies() -> None:
    found = (
        "SELECT b.job_id, b.first_row, b.packed FROM body_pack b JOIN job ON job.id = b.job_id "
        "ORDER BY b.job_id, b.first_row"
    )
    insert = sa.text(
        "INSERT INTO request_body (request_id, body) SELECT id, :body FROM request "
        "WHERE job_id = :job AND row_index = :row AND kind IS NOT NULL"
    )
    for pack in _packs(found):
        texts = _texts(pack.packed)
        rows = [
            {"job": pack.job_id, "row": pack.first_row + place, "body": text}
            for place, text in enumerate(texts)
            if text
        ]
        op.get_bind().execute(insert, rows)


def _unpack_answers() -> None:
    of_pack = sa.text("SELECT request_id, pack_place FROM result WHERE pack_id = :pack")
    update = sa.text("UPDATE result SET body = :body WHERE request_id = :id")
    for pack in _packs("SELECT id, packed FROM answer_pack ORDER BY id"):
        texts = _texts(pack.packed)
        rows = [
            {"id": id_, "body": texts[place]}
            for id_, place in op.get_bind().execute(of_pack, {"pack": pack.id}).all()
        ]
        if rows:
            op.get_bind().execute(update, rows)


def _packs(statement: str) -> Iterator[Any]:
    """The rows of a query; a few are in memory at once."""
    offset = 0
    while True:
        part = sa.text(f"{statement} LIMIT {_PACKS_AT_ONCE} OFFSET {offset}")
        rows = op.get_bind().execute(part).all()
        if not rows:
            return
        yield from rows
        offset += len(rows)


def _texts(packed: bytes) -> list[str]:
    return zstandard.ZstdDecompressor().decompress(packed).decode().split("\n")

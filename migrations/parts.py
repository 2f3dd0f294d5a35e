"""What Alembic must not compare: PostgreSQL has the tables of `jobs/store/parts.py` in partitions.

Partitions come and go. Unique indexes are in each of them, and foreign keys in none.
"""

import re
from typing import Any

_PARTITION = re.compile(r"(request|request_body|body_pack|answer_pack|result)_p\d+")
_PARTED = ("request", "request_body", "body_pack", "answer_pack", "result")

_OF_SQLITE = ("ix_request_micro_batch_id",)


def is_partition(name: str | None) -> bool:
    """Whether a table is a partition."""
    return _PARTITION.fullmatch(name or "") is not None


def is_compared(dialect: str, schema_object: Any, name: str | None, kind: str, *_: Any) -> bool:  # noqa: ANN401
    """Whether Alembic compares this object with the tables that the store describes."""
    if dialect != "postgresql":
        return True
    if kind == "table":
        return not is_partition(name)
    if kind not in ("index", "unique_constraint", "foreign_key_constraint"):
        return True
    if schema_object.table.name not in _PARTED:
        return True
    if name in _OF_SQLITE:
        return False
    return kind == "index" and not schema_object.unique

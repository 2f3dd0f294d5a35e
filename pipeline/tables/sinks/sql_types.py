"""Arrow types as types of SQL: which are made, which are accepted, and how values are bound."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.types import TypeEngine

from nightjar.pipeline.tables.keys import to_json

AnyType = TypeEngine[Any]

_FAMILIES: tuple[tuple[str, Callable[[pa.DataType], bool]], ...] = (
    ("list", pa.types.is_list),
    ("integer", pa.types.is_integer),
    ("boolean", pa.types.is_boolean),
    ("float", pa.types.is_floating),
    ("date", pa.types.is_date),
    ("moment", pa.types.is_timestamp),
    ("decimal", pa.types.is_decimal),
    ("binary", pa.types.is_binary),
    ("binary", pa.types.is_large_binary),
    ("binary", pa.types.is_fixed_size_binary),
    ("binary", pa.types.is_binary_view),
)
_MADE: dict[str, type[AnyType]] = {
    "boolean": sa.Boolean,
    "float": sa.Double,
    "binary": sa.LargeBinary,
}
_ACCEPTED: dict[str, tuple[type[AnyType], ...]] = {
    "list": (sa.ARRAY,),
    "moment": (sa.DateTime,),
    "integer": (sa.Integer, sa.Numeric),
    "boolean": (sa.Boolean,),
    "float": (sa.Float, sa.Numeric),
    "date": (sa.Date,),
    "decimal": (sa.Numeric,),
    "binary": (sa.LargeBinary,),
}
_PLAIN = ("integer", "boolean", "float", "binary")  # of both databases
_NUL, _REPLACEMENT = "\x00", "\ufffd"  # PostgreSQL has no NUL in a text


def made_type(type_: pa.DataType, *, is_sqlite: bool) -> AnyType:
    """The type of a column in a table that Nightjar makes.

    SQLite keeps dates, moments and decimals as text, and lists as JSON; it has no types for them.

    Raises:
        ValueError: The database cannot hold these values.
    """
    match _family(type_):
        case "list":
            item = made_type(type_.value_type, is_sqlite=is_sqlite)
            return sa.Text() if is_sqlite else postgresql.ARRAY(item)
        case "integer":
            return _integer(type_, is_sqlite)
        case "moment" if not is_sqlite:
            return sa.TIMESTAMP(timezone=type_.tz is not None)
        case "decimal" if not is_sqlite:
            return sa.Numeric(type_.precision, max(type_.scale, 0))
        case "date" if not is_sqlite:
            return sa.Date()
        case family:
            return _MADE.get(family, sa.Text)()


def accepted(found: AnyType, type_: pa.DataType, *, is_sqlite: bool, is_key: bool) -> bool:
    """Whether a column of an existing table can hold these values."""
    family = _family(type_)
    if family in _PLAIN or not (is_sqlite or family == "text"):
        return isinstance(found, _ACCEPTED[family]) and _details(found, type_)
    if is_key and isinstance(found, sa.Uuid) and not is_sqlite:
        return True
    # An answer may be longer than any length that is declared.
    is_text = isinstance(found, sa.String) and not isinstance(found, sa.Enum)
    return is_text and (is_key or not getattr(found, "length", None))


def _details(found: AnyType, type_: pa.DataType) -> bool:
    """Whether the items of a list, the zone of a moment, the width of a number are right."""
    if isinstance(found, sa.ARRAY):
        return accepted(found.item_type, type_.value_type, is_sqlite=False, is_key=False)
    if isinstance(found, sa.DateTime):
        return bool(found.timezone) == (type_.tz is not None)
    return not isinstance(found, sa.SmallInteger) or type_.bit_width <= 16


def sql_values(values: pa.Array, *, is_sqlite: bool) -> Sequence[Any]:
    """The values as the driver takes them.

    Raises:
        pa.ArrowInvalid: PostgreSQL counts microseconds, and a moment is more exact.
    """
    type_ = values.type
    family = _family(type_)
    if family == "binary":
        return list(values.to_pylist())
    if family == "moment" and type_.unit == "ns" and not is_sqlite:
        return to_json(values.cast(pa.timestamp("us", type_.tz)))
    found = to_json(values)
    if family != "list":
        return found if is_sqlite else [_without_nul(one) for one in found]
    if is_sqlite:
        return [None if one is None else msgspec.json.encode(one).decode() for one in found]
    if pa.types.is_string(type_.value_type):
        return [None if one is None else [_without_nul(text) for text in one] for one in found]
    return found


def _integer(type_: pa.DataType, is_sqlite: bool) -> AnyType:
    if pa.types.is_uint64(type_):
        if is_sqlite:
            raise ValueError("SQLite has no unsigned integers of 64 bits; cast the key to text")
        return sa.Numeric(20, 0)
    bits = type_.bit_width + (1 if pa.types.is_unsigned_integer(type_) else 0)
    return sa.SmallInteger() if bits <= 16 else sa.Integer() if bits <= 32 else sa.BigInteger()


def _family(type_: pa.DataType) -> str:
    return next((name for name, test in _FAMILIES if test(type_)), "text")


def _without_nul(value: Any) -> Any:  # noqa: ANN401 - of any column
    if isinstance(value, str) and _NUL in value:
        return value.replace(_NUL, _REPLACEMENT)
    return value

"""Key columns as `custom_id`, and back: exact for every type that may be a key.

One column of text is the `custom_id` itself. Any other key is a compact JSON array with a value for
each column: integers, booleans and text as they are; dates, moments and decimals as text; binary
as base64. A moment with a zone is written in UTC; the column's type keeps the zone.
"""

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from nightjar.jobs.lines.parsing import MAX_CUSTOM_ID

_decode = msgspec.json.Decoder(list).decode
_encode = msgspec.json.Encoder().encode


class KeyTypeError(ValueError):
    """A column cannot be a key because of its type; the message names it and says what can."""


class BadKeyError(ValueError):
    """A row's key cannot be used.

    Attributes:
        row: Its place in the batch, from 0.
        column: The key column at fault; None where it is the key as a whole.
    """

    def __init__(self, row: int, column: str | None, problem: str) -> None:
        super().__init__(f"{column}: {problem}" if column else problem)
        self.row = row
        self.column = column
        self.problem = problem


class Keys:
    """The key columns of a table.

    Args:
        schema: The key columns, in the order in which they make the key.

    Raises:
        KeyTypeError: There is no column, or one cannot be a key.
    """

    def __init__(self, schema: pa.Schema) -> None:
        if not len(schema):
            raise KeyTypeError("a table needs a key: name at least one key column")
        # A dictionary only says how the values are stored: sinks get the values' own type.
        types = {field.name: _value_type(field.type) for field in schema}
        for name, type_ in types.items():
            _check_type(name, type_)
        self.schema = pa.schema([pa.field(name, type_, False) for name, type_ in types.items()])
        self._is_text = len(self.schema) == 1 and _is_text(self.schema.field(0).type)

    @property
    def names(self) -> list[str]:
        """The names of the key columns."""
        return list(self.schema.names)

    def encode(self, batch: pa.RecordBatch | pa.Table) -> list[str]:
        """The `custom_id` of each row of a batch that has the key columns, and maybe others.

        Raises:
            BadKeyError: A key is null, too long, or no text; the first such row.
        """
        found = [_key_values(batch.column(field.name), field) for field in self.schema]
        if self._is_text:
            ids = found[0]
            _check_texts(ids, self.names[0])
        else:
            ids = [_encode(row).decode() for row in zip(*found, strict=True)]
        if ids and max(map(len, ids)) > MAX_CUSTOM_ID:
            row = next(row for row, id_ in enumerate(ids) if len(id_) > MAX_CUSTOM_ID)
            problem = f"the key has {len(ids[row])} characters as text, at most {MAX_CUSTOM_ID} fit"
            raise BadKeyError(row, None, f"{problem}; choose shorter key columns")
        return ids

    def decode(self, custom_ids: Sequence[str]) -> list[pa.Array]:
        """The key columns of rows whose `custom_id` are given.

        Raises:
            ValueError: One of them is no key of these columns.
        """
        if self._is_text:
            return [pa.array(custom_ids, self.schema.field(0).type)]
        try:
            rows = [_decode(id_) for id_ in custom_ids]
            columns = zip(*rows, strict=True) if rows else [()] * len(self.schema)
            return [
                from_json(values, field.type)
                for field, values in zip(self.schema, columns, strict=True)
            ]
        except (msgspec.MsgspecError, TypeError, ValueError, pa.ArrowException) as error:
            raise ValueError(f"a custom_id is no key of {', '.join(self.names)}") from error


def to_json(values: pa.Array) -> list[Any]:
    """The values as JSON has them, exactly; other types than those of keys as they are.

    Raises:
        pa.ArrowInvalid: A date or moment has no text.
    """
    if _is_binary(values.type):
        return [None if one is None else _base64(one) for one in values.to_pylist()]
    return _texts(values) if _has_text(values.type) else list(values.to_pylist())


def from_json(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """The values that `to_json` gave for an array of this type."""
    if _is_binary(type_):
        return pa.array([base64.b64decode(value, validate=True) for value in values], type_)
    return (
        pa.array(values, pa.string()).cast(type_) if _has_text(type_) else pa.array(values, type_)
    )


def _key_values(values: pa.Array | pa.ChunkedArray, field: pa.Field) -> list[Any]:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if values.null_count:
        row = values.is_null().to_pylist().index(True)
        raise BadKeyError(row, field.name, "is null; every row needs a key")
    try:
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        return to_json(values if values.type == field.type else values.cast(field.type))
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise BadKeyError(0, field.name, f"cannot be a key: {error}") from error


def _value_type(type_: pa.DataType) -> pa.DataType:
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def _is_text(type_: pa.DataType) -> bool:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(type_) for test in tests)


def _is_binary(type_: pa.DataType) -> bool:
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return any(test(type_) for test in tests) or bool(pa.types.is_binary_view(type_))


def _has_text(type_: pa.DataType) -> bool:
    """Whether its values are written as text, because JSON has no such values."""
    tests = (pa.types.is_date, pa.types.is_timestamp, pa.types.is_decimal)
    return any(test(type_) for test in tests)


def _check_type(name: str, type_: pa.DataType) -> None:
    is_plain = pa.types.is_integer(type_) or pa.types.is_boolean(type_)
    if is_plain or _is_text(type_) or _is_binary(type_) or _has_text(type_):
        return
    why = "floating-point values are not exact" if pa.types.is_floating(type_) else "it has no text"
    raise KeyTypeError(
        f"the key column {name} has the type {type_}, which cannot be a key ({why}); a key "
        "is text, an integer, a boolean, a date, a timestamp, a decimal or binary: cast it"
    )


def _texts(values: pa.Array) -> list[str]:
    zoned = pa.types.is_timestamp(values.type) and values.type.tz is not None
    # In UTC: the offsets of a zone's distant past have seconds, which the text lacks.
    plain = values.cast(pa.timestamp(values.type.unit, "UTC")) if zoned else values
    texts = pc.cast(plain, pa.string())
    try:
        exact = texts.cast(values.type).equals(values)
    except pa.ArrowInvalid:
        exact = False
    if not exact:
        raise pa.ArrowInvalid("a value is out of the years 0001 to 9999, or no whole day")
    found: list[str] = texts.to_pylist()
    return found


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _check_texts(ids: Sequence[str], name: str) -> None:
    for row, id_ in enumerate(ids):
        if not id_ or "\x00" in id_:
            what = "holds a NUL character" if id_ else "is empty"
            raise BadKeyError(row, name, f"{what}; every row needs a key of at least one character")

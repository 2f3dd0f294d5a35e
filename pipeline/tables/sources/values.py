"""From Python values to Arrow columns; a value of another type costs its own row alone."""

import datetime
import decimal
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from nightjar.pipeline.tables.sources.piece import Fault, Piece

INFERRED_FROM = 1_000
"""So many rows say which types the columns have."""

_FITS: list[tuple[Callable[[pa.DataType], bool], tuple[type, ...]]] = [
    (pa.types.is_boolean, (bool,)),
    (pa.types.is_integer, (int,)),
    (pa.types.is_floating, (float, int)),
    (pa.types.is_string, (str,)),
    (pa.types.is_timestamp, (datetime.datetime,)),
    (pa.types.is_date, (datetime.date,)),
    (pa.types.is_list, (list, tuple)),
    (pa.types.is_struct, (dict,)),
]
_NUMBERS = {int, float}


def infer_type(values: Sequence[object]) -> pa.DataType:
    """Return the type of a column from its first values; text where they do not agree.

    A column of nulls alone is a column of texts. Whole numbers among others are such numbers, too.
    """
    kinds = {type(value) for value in values if value is not None}
    if kinds == _NUMBERS:
        return pa.float64()
    if not kinds or len(kinds) > 1 or decimal.Decimal in kinds:
        return pa.string()
    try:
        return _without_nulls(pa.array(values).type)
    except (pa.ArrowException, OverflowError, UnicodeError):
        return pa.string()


def _without_nulls(found: pa.DataType) -> pa.DataType:
    """Replace the type of nulls, at any depth, by text."""
    if pa.types.is_null(found):
        return pa.string()
    if pa.types.is_list(found):
        return pa.list_(_without_nulls(found.value_type))
    if pa.types.is_struct(found):
        return pa.struct([(one.name, _without_nulls(one.type)) for one in found])
    return found


def infer_schema(rows: Sequence[Mapping[str, object]]) -> pa.Schema:
    """Return the schema of the first rows of a source, whose rows name their columns."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.schema([(name, infer_type([row.get(name) for row in rows])) for name in names])


def build(values: Sequence[Any], wanted: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """Return a column, and by index what is wrong with a value that does not fit."""
    fitting = next((types for is_type, types in _FITS if is_type(wanted)), None)
    if fitting is None or {type(value) for value in values} <= {*fitting, type(None)}:
        try:
            return pa.array(values, type=wanted), {}
        except (pa.ArrowException, OverflowError, UnicodeError):
            pass  # one of them does not fit: find it
    good, wrong = [], {}
    for index, value in enumerate(values):
        good.append(value)
        if value is None:
            continue
        if (fitting is not None and type(value) not in fitting) or not _holds(wanted, value):
            good[-1] = None
            wrong[index] = f"is {_said(value)}; the column holds {words(wanted)}"
    return pa.array(good, type=wanted), wrong


def _holds(wanted: pa.DataType, value: object) -> bool:
    try:
        pa.array([value], type=wanted)
    except (pa.ArrowException, OverflowError, UnicodeError):
        return False
    return True


def parse(texts: pa.Array, wanted: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """Return a column of texts as another type, and by index what is wrong with a text."""
    if wanted == pa.string():
        return texts, {}
    try:
        return pc.cast(texts, wanted), {}
    except pa.ArrowException:
        pass  # one of them cannot be read: find it
    good, wrong = [], {}
    for index, text in enumerate(texts):
        try:
            good.append(pc.cast(text, wanted).as_py())
        except pa.ArrowException:
            good.append(None)
            wrong[index] = f"cannot be read as {words(wanted)}"
    return pa.array(good, type=wanted), wrong


def piece_of(
    columns: Mapping[str, tuple[pa.Array, Mapping[int, str]]],
    faults: Mapping[int, Fault],
) -> Piece:
    """Join columns with what is wrong with their values; the faults of whole rows go first.

    `columns` is not empty.
    """
    found = {
        index: Fault(name, reason)
        for name, (_, wrong) in columns.items()
        for index, reason in wrong.items()
    }
    rows = pa.record_batch({name: array for name, (array, _) in columns.items()})
    return Piece(rows, found | dict(faults))


_WORDS: list[tuple[Callable[[pa.DataType], bool], str]] = [
    (pa.types.is_string, "texts"),
    (pa.types.is_boolean, "true or false"),
    (pa.types.is_integer, "whole numbers"),
    (pa.types.is_floating, "numbers"),
    (pa.types.is_struct, "structs"),
]


def words(found: pa.DataType) -> str:
    """Say what a column holds."""
    if pa.types.is_list(found):
        return f"lists of {words(found.value_type)}"
    return next((said for is_type, said in _WORDS if is_type(found)), f"{found} values")


def _said(value: object) -> str:
    """Say of which type a value is; never the value itself, which may be private."""
    if isinstance(value, float) and not math.isfinite(value):
        return "not a finite number"
    names = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
    names |= {list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")

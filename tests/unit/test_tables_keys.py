"""Key columns as custom_ids and back: exact for every type."""

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightjar.jobs.lines.parsing import MAX_CUSTOM_ID
from nightjar.jobs.records import is_text
from nightjar.pipeline.tables.keys import BadKeyError, Keys, KeyTypeError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
YEARS = {"min_value": dt.datetime(1, 1, 2), "max_value": dt.datetime(9999, 12, 30)}
NS_YEARS = {"min_value": dt.datetime(1700, 1, 1), "max_value": dt.datetime(2200, 1, 1)}


def moments(unit: str, **years: Any) -> st.SearchStrategy[Any]:
    coarse = {"s": {"microsecond": 0}, "ms": {"microsecond": 1000}}.get(unit, {})
    return st.datetimes(**years).map(lambda found: found.replace(**coarse))


def zoned(found: dt.datetime) -> dt.datetime:
    return found.replace(tzinfo=dt.UTC)


VALUES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    *((kind, TEXT) for kind in (pa.string(), pa.large_string(), pa.string_view())),
    *((pa.int8(), st.integers(-(2**7), 2**7 - 1)), (pa.int64(), st.integers(-(2**63), 2**63 - 1))),
    *((pa.uint16(), st.integers(0, 2**16 - 1)), (pa.uint64(), st.integers(0, 2**64 - 1))),
    (pa.bool_(), st.booleans()),
    *((kind, st.dates()) for kind in (pa.date32(), pa.date64())),
    *((pa.timestamp(unit), moments(unit, **YEARS)) for unit in ("s", "ms", "us")),
    (pa.timestamp("ns"), st.datetimes(**NS_YEARS)),
    (pa.timestamp("us", "Asia/Seoul"), moments("us", **YEARS).map(zoned)),
    (pa.timestamp("ns", "UTC"), st.datetimes(**NS_YEARS).map(zoned)),
    (pa.decimal128(12, 3), st.decimals(-999_999, 999_999, places=3)),
    (pa.decimal256(40, 10), st.decimals(-1, 1, places=10)),
    *((kind, st.binary(max_size=20)) for kind in (pa.binary(), pa.large_binary())),
    (pa.binary(4), st.binary(min_size=4, max_size=4)),
]


@st.composite
def tables(draw: st.DrawFn) -> pa.RecordBatch:
    columns = draw(st.lists(st.sampled_from(VALUES), min_size=1, max_size=4))
    rows = draw(st.integers(0, 4))
    made = [
        pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), kind)
        for kind, values in columns
    ]
    return pa.record_batch(made, names=[f"k{number}" for number in range(len(made))])


@given(tables())
def test_keys_come_back_as_they_were(batch: pa.RecordBatch) -> None:
    keys = Keys(batch.schema)
    try:
        ids = keys.encode(batch)
    except BadKeyError as error:
        assert batch.num_columns == 1
        text = batch.column(0)[error.row].as_py()
        assert text == "" or "\x00" in text
        return
    assert all(is_text(one, MAX_CUSTOM_ID) for one in ids)
    back = keys.decode(ids)
    assert [one.type for one in back] == batch.schema.types
    assert [one.to_pylist() for one in back] == [one.to_pylist() for one in batch.columns]


def test_how_keys_are_written() -> None:
    noon = dt.datetime(2026, 11, 24, 12, tzinfo=dt.UTC)
    columns = {
        "text": pa.array(['a"b']),
        "number": pa.array([7]),
        "yes": pa.array([True]),
        "day": pa.array([dt.date(2026, 11, 24)]),
        "moment": pa.array([noon], pa.timestamp("s", "Asia/Seoul")),
        "price": pa.array([Decimal("1.50")]),
        "raw": pa.array([b"\x00\xff"]),
    }
    batch = pa.record_batch(columns)
    (id_,) = Keys(batch.schema).encode(batch)
    assert id_ == ('["a\\"b",7,true,"2026-11-24","2026-11-24 12:00:00Z","1.50","AP8="]')
    one = pa.record_batch({"text": pa.array(["user-7"])})
    assert Keys(one.schema).encode(one) == ["user-7"]
    assert Keys(pa.schema([("n", pa.int64())])).encode(pa.table({"n": [7]})) == ["[7]"]


def test_the_zone_is_of_the_type_and_the_distant_past_is_exact() -> None:
    """Before 1908, the offset of Seoul had seconds."""
    values = pa.array([dt.datetime(1890, 5, 1, tzinfo=dt.UTC)], pa.timestamp("us", "Asia/Seoul"))
    batch = pa.record_batch({"at": values})
    keys = Keys(batch.schema)
    assert keys.decode(keys.encode(batch))[0].equals(values)


def test_a_dictionary_is_the_type_of_its_values() -> None:
    batch = pa.record_batch({"shop": pa.array(["a", "b", "a"]).dictionary_encode()})
    keys = Keys(batch.schema)
    assert keys.schema.field("shop").type == pa.string()
    assert keys.encode(batch) == ["a", "b", "a"]
    assert keys.encode(pa.table([pa.chunked_array([["a"], ["b"]])], ["shop"])) == ["a", "b"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (pa.float64(), "not exact"),
        (pa.list_(pa.string()), "cannot be a key"),
        (pa.struct([("a", pa.int64())]), "cannot be a key"),
        (pa.time64("us"), "cannot be a key"),
        (pa.null(), "cannot be a key"),
    ],
)
def test_a_type_that_is_no_key_is_named(kind: pa.DataType, said: str) -> None:
    with pytest.raises(KeyTypeError, match=said) as caught:
        Keys(pa.schema([("id", pa.int64()), ("weight", kind)]))
    assert "weight" in str(caught.value)


def test_a_table_needs_a_key() -> None:
    with pytest.raises(KeyTypeError, match="name at least one"):
        Keys(pa.schema([]))


@pytest.mark.parametrize(
    ("values", "row", "said"),
    [
        (["a", None], 1, "null"),
        (["a", ""], 1, "empty"),
        (["a", "b\x00"], 1, "NUL"),
        (["a", "b" * (MAX_CUSTOM_ID + 1)], 1, f"{MAX_CUSTOM_ID + 1} characters"),
    ],
)
def test_a_bad_key_is_found_with_its_row(values: list[str | None], row: int, said: str) -> None:
    keys = Keys(pa.schema([("id", pa.string())]))
    with pytest.raises(BadKeyError, match=said) as caught:
        keys.encode(pa.record_batch({"id": pa.array(values, pa.string())}))
    assert caught.value.row == row
    fitting = pa.record_batch({"id": pa.array(["b" * MAX_CUSTOM_ID])})
    assert len(keys.encode(fitting)[0]) == MAX_CUSTOM_ID


@pytest.mark.parametrize(
    "values",
    [
        pa.array([5 * 10**18], pa.timestamp("us")),
        pa.array([-(10**17)], pa.timestamp("us")),
        pa.array([1], pa.date64()),  # a millisecond
        pa.array([-800_000], pa.date32()),
    ],
)
def test_a_date_that_has_no_exact_text_is_refused(values: pa.Array) -> None:
    batch = pa.record_batch({"at": values})
    with pytest.raises(BadKeyError, match="at: cannot be a key"):
        Keys(batch.schema).encode(batch)


@pytest.mark.parametrize("id_", ["no json", "[1]", "[1,2,3]", '["a",2]', "7"])
def test_a_custom_id_of_another_table_is_refused(id_: str) -> None:
    keys = Keys(pa.schema([("a", pa.int64()), ("b", pa.int64())]))
    with pytest.raises(ValueError, match="no key of a, b"):
        keys.decode([id_])

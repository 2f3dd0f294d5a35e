"""Sources of files: what they read, and what becomes of files that cannot be read."""

import gzip
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

from nightjar.pipeline.tables.sources import piece
from nightjar.pipeline.tables.sources.csv_files import CsvSource
from nightjar.pipeline.tables.sources.json_lines import JsonLinesSource
from nightjar.pipeline.tables.sources.parquet import SUFFIXES, ParquetSource
from nightjar.pipeline.tables.sources.piece import Source, SourceError
from nightjar.pipeline.tables.sources.places import list_files
from tests.tasks import write_rows


def parquet(folder: Path, place: str = ".") -> ParquetSource:
    return ParquetSource(list_files(place, folder, SUFFIXES))


def read(source: Source, *columns: str) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """All rows, and by number from 0 why a row cannot be used."""
    rows: list[dict[str, Any]] = []
    faults: dict[int, str] = {}
    for one in source.batches(columns):
        faults |= {len(rows) + index: fault.reason for index, fault in one.faults.items()}
        rows += one.rows.to_pylist()
    return rows, faults


def test_a_folder_of_parquet_with_partitions(tmp_path: Path) -> None:
    write_rows(tmp_path, {"id": [1, 2], "text": ["a", "b"]}, "day=2026-11-24/b.parquet")
    write_rows(tmp_path, {"id": [3], "text": ["c"]}, "day=2026-11-23/z.parquet")
    write_rows(tmp_path, {"other": [1]}, "_temporary/x.parquet")
    (tmp_path / "notes.txt").write_text("no rows")
    source = parquet(tmp_path)
    assert source.schema.names == ["id", "text", "day"]
    rows, _ = read(source, "day", "id")
    assert rows == [
        {"day": "2026-11-23", "id": 3},
        {"day": "2026-11-24", "id": 1},
        {"day": "2026-11-24", "id": 2},
    ]
    assert [row["day"] for row in read(source, "day")[0]] == ["2026-11-23", *["2026-11-24"] * 2]
    assert source.count() == 3


def test_pieces_are_bounded_in_rows_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path, {"id": list(range(2_500)), "text": ["x" * 100] * 2_500})
    sizes = [one.rows.num_rows for one in parquet(tmp_path, "rows.parquet").batches(["id"])]
    assert (sum(sizes), max(sizes)) == (2_500, 1_000)
    monkeypatch.setattr(piece, "MOST_BYTES", 10_000)
    pieces = list(parquet(tmp_path, "rows.parquet").batches(["id", "text"]))
    assert sum(one.rows.num_rows for one in pieces) == 2_500
    assert max(one.rows.num_rows for one in pieces) < 100


def test_types_are_those_of_the_first_file(tmp_path: Path) -> None:
    dictionary = pa.array(["a", "b"]).dictionary_encode()
    write_rows(tmp_path, {"id": pa.array([1, 2], pa.int64()), "text": dictionary}, "1.parquet")
    write_rows(tmp_path, {"id": pa.array([3], pa.int32()), "text": ["c"]}, "2.parquet")
    source = parquet(tmp_path)
    assert source.schema.field("text").type == pa.string()
    assert [tuple(row.values()) for row in read(source, "id", "text")[0]] == [
        (1, "a"),
        (2, "b"),
        (3, "c"),
    ]
    write_rows(tmp_path, {"id": ["x"], "text": ["d"]}, "3.parquet")
    with pytest.raises(SourceError, match=r"3\.parquet: the column 'id' holds string.*one schema"):
        read(parquet(tmp_path), "id")
    write_rows(tmp_path, {"id": [4]}, "3.parquet")
    with pytest.raises(SourceError, match=r"3\.parquet has no column 'text'"):
        read(parquet(tmp_path), "text")


def test_types_of_other_writers_are_read_as_plain_ones(tmp_path: Path) -> None:
    item = pa.struct({"title": pa.large_string()})
    columns = {
        "id": pa.array(["a"], pa.string_view()),
        "text": pa.array(["b"], pa.large_string()),
        "items": pa.array([[{"title": "c"}]], pa.large_list(item)),
    }
    write_rows(tmp_path, columns)
    source = parquet(tmp_path, "rows.parquet")
    plain = pa.list_(pa.struct({"title": pa.string()}))
    assert source.schema == pa.schema({"id": pa.string(), "text": pa.string(), "items": plain})
    assert read(source, "items", "id")[0] == [{"items": [{"title": "c"}], "id": "a"}]


def test_a_file_that_is_cut_off_or_damaged(tmp_path: Path) -> None:
    whole = write_rows(tmp_path, {"id": list(range(1000))}).read_bytes()
    (tmp_path / "rows.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError, match=r"rows\.parquet is cut off.*copy or write it again"):
        parquet(tmp_path, "rows.parquet")
    (tmp_path / "rows.parquet").write_bytes(whole[:4] + b"\xff" * 100 + whole[104:])
    with pytest.raises(SourceError, match=r"rows\.parquet is damaged"):
        read(parquet(tmp_path, "rows.parquet"), "id")
    (tmp_path / "rows.parquet").write_bytes(whole[:-20] + b"\xff" * 12 + whole[-8:])
    with pytest.raises(SourceError, match=r"rows\.parquet is damaged"):
        parquet(tmp_path, "rows.parquet")
    (tmp_path / "rows.parquet").write_text("id,text\n1,a\n")
    with pytest.raises(SourceError, match="is not a Parquet file"):
        parquet(tmp_path, "rows.parquet")


class _Plain(pe.KmsClient):
    """Keys that are not wrapped."""

    def __init__(self, _: object) -> None:
        pe.KmsClient.__init__(self)

    def wrap_key(self, key: bytes, _: str) -> str:
        return key.hex()


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_an_encrypted_file(tmp_path: Path, plaintext_footer: bool) -> None:
    table = pa.table({"id": [1, 2]})
    asked = pe.EncryptionConfiguration("f", column_keys={"c": ["id"]})
    asked.plaintext_footer = plaintext_footer
    factory = pe.CryptoFactory(_Plain)
    keys = factory.file_encryption_properties(pe.KmsConnectionConfig(), asked)
    with pq.ParquetWriter(tmp_path / "x.parquet", table.schema, encryption_properties=keys) as file:
        file.write_table(table)
    with pytest.raises(SourceError, match=r"x\.parquet is encrypted.*decrypt it"):
        read(parquet(tmp_path, "x.parquet"), "id")


def test_the_list_of_files_is_fixed_at_the_start(tmp_path: Path) -> None:
    write_rows(tmp_path, {"id": list(range(1_500))}, "1.parquet")
    write_rows(tmp_path, {"id": [-1]}, "3.parquet")
    source = parquet(tmp_path)
    before = source.digest()
    pieces = source.batches(["id"])
    rows = next(pieces).rows.to_pylist()
    write_rows(tmp_path, {"id": [-2]}, "2.parquet")
    rows += [row for one in pieces for row in one.rows.to_pylist()]
    assert [row["id"] for row in rows] == [*range(1_500), -1]
    assert source.digest() == before != parquet(tmp_path).digest()
    (tmp_path / "3.parquet").unlink()
    with pytest.raises(SourceError, match=r"3\.parquet is gone"):
        read(source, "id")
    write_rows(tmp_path, {"id": [-1, -2]}, "3.parquet")
    with pytest.raises(SourceError, match=r"3\.parquet has changed"):
        read(source, "id")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nowhere.parquet", "there is no such file"),
        ("empty", r"holds no file that ends with \.parquet"),
        ("gs://bucket/x", "gs:// is not supported"),
        ("s3://key:secret@bucket/x", "AWS_ACCESS_KEY_ID"),
    ],
)
def test_places_without_rows(tmp_path: Path, place: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=said) as raised:
        parquet(tmp_path, place)
    assert "secret" not in str(raised.value)


def csv_source(folder: Path, content: bytes, **types: pa.DataType) -> CsvSource:
    (folder / "rows.csv").write_bytes(content)
    return CsvSource(list_files("rows.csv", folder, (".csv",)), ",", types)


def test_csv_is_text_unless_said_otherwise(tmp_path: Path) -> None:
    content = '\ufeffid,text,price\n007,"a, ""b""\nc",1.50\n8,,2\n9,d,cheap\n'.encode()
    rows, faults = read(csv_source(tmp_path, content), "id", "text", "price")
    assert rows[0] == {"id": "007", "text": 'a, "b"\nc', "price": "1.50"}
    assert rows[1]["text"] is None
    rows, faults = read(
        csv_source(tmp_path, content, id=pa.int64(), price=pa.float64()), "id", "price"
    )
    assert [row["id"] for row in rows] == [7, 8, 9]
    assert [row["price"] for row in rows] == [1.5, 2.0, None]
    assert faults == {2: "cannot be read as numbers"}


def test_a_bad_row_of_csv_costs_itself_alone(tmp_path: Path) -> None:
    content = b'id,text\n1,a\n2,b,c\n"x"y,d\n4,\xff\n5\n6,last'
    rows, faults = read(csv_source(tmp_path, content), "id", "text")
    assert [row["id"] for row in rows] == ["1", None, None, None, None, "6"]
    assert list(faults) == [1, 2, 3, 4]
    assert "3 values for 2 columns" in faults[1]
    assert "line 4 of the file" in faults[2]
    assert "UTF-8" in faults[3]


def test_a_quote_that_is_never_closed_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightjar.pipeline.tables.sources.csv_files._MOST_CHARACTERS", 1_000)
    content = b'id,text\n1,"' + b"a\n" * 5_000
    _, faults = read(csv_source(tmp_path, content), "id")
    assert "field larger than" in faults[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"id,id\n1,2\n", "the name 'id' twice"),
        (b"id,,x\n1,2,3\n", "a column without name"),
    ],
)
def test_csv_without_names(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(SourceError, match=said):
        csv_source(tmp_path, content)


def test_compressed_files_and_folders_of_csv(tmp_path: Path) -> None:
    (tmp_path / "1.csv.gz").write_bytes(gzip.compress(b"id,text\n1,a\n"))
    (tmp_path / "2.csv").write_bytes(b"text,id\nb,2\n")
    source = CsvSource(list_files(".", tmp_path, (".csv", ".csv.gz")), ",", {})
    assert read(source, "id", "text")[0] == [{"id": "1", "text": "a"}, {"id": "2", "text": "b"}]
    (tmp_path / "3.csv").write_bytes(b"id,other\n3,c\n")
    source = CsvSource(list_files(".", tmp_path, (".csv", ".csv.gz")), ",", {})
    with pytest.raises(SourceError, match=r"3\.csv has other columns than .*1\.csv\.gz"):
        read(source, "id")
    (tmp_path / "1.csv.gz").write_bytes(gzip.compress(b"id,text\n" + os.urandom(50_000))[:20_000])
    with pytest.raises(SourceError, match=r"1\.csv\.gz is damaged"):
        read(CsvSource(list_files("1.csv.gz", tmp_path, (".csv",)), ",", {}), "id")


def json_source(folder: Path, content: bytes) -> JsonLinesSource:
    (folder / "rows.jsonl").write_bytes(content)
    return JsonLinesSource(list_files("rows.jsonl", folder, (".jsonl",)))


def test_a_value_of_another_type_costs_its_own_row(tmp_path: Path) -> None:
    lines = [b'{"id": %d, "text": "a", "n": %d, "docs": ["x"]}' % (n, n) for n in range(1_000)]
    lines += [
        b'{"id": 1.5, "text": "a", "n": 1, "docs": ["x"]}',
        b'{"id": 1000, "text": 7, "n": 1, "docs": ["x"]}',
        b'{"id": 1001, "text": "a", "n": 2.5, "docs": "x"}',
        b'{"id": 99999999999999999999, "text": "a"}',
        b"[1]",
        b'{"id": ',
        b"",
        b'{"id": 1002, "text": null, "docs": ["x", 3]}',
        b'{"id": 1003}',
    ]
    source = json_source(tmp_path, b"\n".join(lines))
    rows, faults = read(source, "id", "text", "docs")
    assert faults == {
        1000: "is a number; the column holds whole numbers",
        1001: "is a whole number; the column holds texts",
        1002: "is a text; the column holds lists of texts",
        1003: "is a whole number; the column holds whole numbers",
        1004: "is not a JSON object (line 1005 of the file); write {...}",
        1005: faults[1005],
        1006: "is a list; the column holds lists of texts",
    }
    assert "broken JSON" in faults[1005]
    assert rows[1007] == {"id": 1003, "text": None, "docs": None}


def test_types_of_json_lines_are_those_of_the_first_rows(tmp_path: Path) -> None:
    content = b'{"a": 1, "b": null, "c": true}\n{"a": 2.5, "b": null, "d": {"x": null}}\n'
    source = json_source(tmp_path, content)
    assert source.schema == pa.schema(
        {
            "a": pa.float64(),
            "b": pa.string(),
            "c": pa.bool_(),
            "d": pa.struct({"x": pa.string()}),
        }
    )
    with pytest.raises(SourceError, match="no line that can be used: the first is broken JSON"):
        json_source(tmp_path, b"PAR1 what?\n")
    with pytest.raises(SourceError, match="the first is empty"):
        json_source(tmp_path, b"\n")

"""Files of other formats are told by their first bytes, and what may be batch lines never is."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import sqlite3
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from nightjar.jobs.lines.file_kinds import HEAD_BYTES, other_format

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "가"}}
GOOD = json.dumps(LINE, ensure_ascii=False).encode() + b"\n"
TEXT = GOOD.decode()


def archive(kind: str) -> bytes:
    stream = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(stream, "w") as packed:
            packed.writestr("in.jsonl", GOOD)
    else:
        with tarfile.open(fileobj=stream, mode="w") as packed_tar:
            member = tarfile.TarInfo("in.jsonl")
            member.size = len(GOOD)
            packed_tar.addfile(member, io.BytesIO(GOOD))
    return stream.getvalue()


def database(folder: Path) -> bytes:
    path = folder / "rows.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table t (prompt text)")
    connection.close()
    return path.read_bytes()


def array() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.zeros(3))
    return stream.getvalue()


OTHERS = {
    "Parquet": b"PAR1\x15\x04\x15",
    "zstd": b"\x28\xb5\x2f\xfd\x24",
    "gzip": gzip.compress(GOOD),
    "bzip2": bz2.compress(GOOD),
    "xz": lzma.compress(GOOD),
    "zip": archive("zip"),
    "tar": archive("tar"),
    "pickle": pickle.dumps([LINE]),
    "NumPy": array(),
    "UTF-16": TEXT.encode("utf-16"),
    "UTF-16 ": TEXT.replace("가", "a").encode("utf-16-be"),
    " UTF-16": TEXT.replace("가", "a").encode("utf-16-le"),
    "UTF-32": TEXT.encode("utf-32"),
    "JSON array": json.dumps([LINE]).encode(),
    " JSON array": json.dumps([LINE], indent=1).encode(),
    "over several lines": b"\xef\xbb\xbf" + json.dumps(LINE, indent=2).encode(),
    "CSV": b"id,prompt\n1,hello\n2,again\n",
    " CSV": "id\tprompt\r\n1\t가\r\n2\t나\r\n".encode(),
    "HTML": b"<!DOCTYPE html>\n<html>",
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_format_is_told_with_its_mend(name: str) -> None:
    found = other_format(OTHERS[name][:HEAD_BYTES])
    assert found is not None
    assert name.strip() in found.split(";")[0]
    assert len(found.partition(";")[2]) > 20


def test_a_table_may_be_read_by_a_task_file(tmp_path: Path) -> None:
    for head in (OTHERS["Parquet"], OTHERS["CSV"], database(tmp_path)):
        assert "task file" in (other_format(head[:HEAD_BYTES]) or "")


def test_a_database_is_told(tmp_path: Path) -> None:
    assert "SQLite" in (other_format(database(tmp_path)[:HEAD_BYTES]) or "")


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\n",
        GOOD * 40,
        b"\xef\xbb\xbf" + GOOD,
        b"\r\n  \r\n" + GOOD,
        b"no json, alas\n" + GOOD * 3,  # one bad line costs itself
        b"[1, 2]\n" + GOOD,
        b"{broken\n" + GOOD,
        b"\x00\n" + GOOD,
        GOOD[:30],
    ],
)
def test_what_may_be_batch_lines_is_read_line_by_line(head: bytes) -> None:
    assert other_format(head[:HEAD_BYTES]) is None

"""The page of measurements takes its figures from the newest files."""

import json
from pathlib import Path

import pytest

from benchmarks.harness import RESULTS
from benchmarks.report import MEASUREMENTS, filled
from benchmarks.report import TABLE as TABLES

TABLE = """Words, and 7 of them.

<!-- file: calls-2026-01-01.json -->

| figure | SQLite | PostgreSQL | key |
|---|---|---|---|
| a call, ms | 1.0 | 2.0 | `calls.p50_ms` |
| calls | 3 | 4 | `calls.count` |

More words.
"""


def write(folder: Path, name: str, *calls: dict[str, float]) -> None:
    kinds = zip(("sqlite", "postgresql"), calls, strict=True)
    record = {kind: {"calls": found} for kind, found in kinds}
    (folder / name).write_text(json.dumps(record))


def test_a_table_takes_the_newest_file_that_has_its_figures(tmp_path: Path) -> None:
    both = {"p50_ms": 1234.5, "count": 9}
    write(tmp_path, "calls-2026-01-02.json", both, {"p50_ms": 0.25, "count": 1200})
    write(tmp_path, "calls-2026-01-03.json", both, {"p50_ms": 6.0})  # without a count
    write(tmp_path, "calls-of-others-2026-01-04.json", both, both)
    expected = TABLE.replace("2026-01-01", "2026-01-02")
    expected = expected.replace("| 1.0 | 2.0 |", "| 1,234.5 | 0.25 |")
    assert filled(TABLE, tmp_path) == expected.replace("| 3 | 4 |", "| 9 | 1,200 |")


def test_a_table_without_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="no calls-DATE"):
        filled(TABLE, tmp_path)


def test_the_page_names_the_newest_files() -> None:
    text = MEASUREMENTS.read_text(encoding="utf-8")
    named = [found.group(1, 2) for found in TABLES.finditer(text)]
    assert len(named) > 5
    assert [found.group(1, 2) for found in TABLES.finditer(filled(text, RESULTS))] == named

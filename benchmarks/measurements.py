"""Put the newest figures into docs/reference/measurements.md: `python -m benchmarks.measurements`.

Each table there stands below `<!-- file: NAME-DATE.json -->`. It takes its cells from the newest
file of that name that has all of its figures, and then names that file. A table that has no file
yet stands below `<!-- not measured yet: NAME -->`.
"""

import json
import re
from pathlib import Path
from typing import Any

from .writing import RESULTS, ROOT

PAGE = ROOT / "docs" / "reference" / "measurements.md"
TABLE = re.compile(
    r"<!-- (?:file: ([\w-]+)-(\d{4}-\d\d-\d\d)\.json|not measured yet: ([\w-]+)) -->"
    r"\n\n((?:\|.*\n)+)"
)
# Columns whose part of the file has another place than the column's name in small letters.
_PRECISIONS = ("demo_model", "by_precision")

Record = dict[str, Any]


def filled(text: str, folder: Path) -> str:
    """The page with the newest figures; raises LookupError where no file has a table's figures."""
    return TABLE.sub(lambda found: _filled_table(found, folder), text)


def _filled_table(found: re.Match[str], folder: Path) -> str:
    name, lines = found[1] or found[3], found[4].splitlines()
    columns = _cells(lines[0])[1:-1]
    for path in sorted(folder.glob(f"{name}-????-??-??.json"), reverse=True):
        record = json.loads(path.read_text(encoding="utf-8"))
        try:
            rows = [_filled_row(line, columns, record) for line in lines[2:]]
        except KeyError:  # an older kind of measurement, or another one of the same name
            continue
        return "\n".join([f"<!-- file: {path.name} -->", "", *lines[:2], *rows, ""])
    if found[3] is not None:
        return found[0]
    raise LookupError(f"no {name}-DATE.json in {folder} has all figures of its table")


def _filled_row(line: str, columns: list[str], record: Record) -> str:
    what, *_, key = _cells(line)
    values = [_at(_part(record, column), key.strip("`")) for column in columns]
    return f"| {what} | {' | '.join(f'{value:,}' for value in values)} | {key} |"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _part(record: Record, column: str) -> Record:
    """The part of a file that a column shows; all of it if the table has one column of values."""
    if column in ("SQLite", "PostgreSQL"):
        return dict(record[column.lower()])
    if _PRECISIONS[0] in record:
        return dict(record[_PRECISIONS[0]][_PRECISIONS[1]][column])
    return record


def _at(record: Record, key: str) -> float:
    found: Any = record
    for part in key.split("."):
        found = found[part]
    return float(found) if isinstance(found, float) else int(found)


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")


if __name__ == "__main__":
    main()

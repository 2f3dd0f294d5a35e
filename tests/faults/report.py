"""One row for each fault: kept as JSON, shown as a table in docs/reference/faults.md."""

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.machine import describe

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "reference" / "faults.md"
BEGIN, END = "<!-- faults begin -->", "<!-- faults end -->"
_HEAD = (
    "| # | fault | database | system | times | requests | lost | twice | computed again "
    "| back after | note |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Row:
    """What was done to one system on one database, and what became of its requests.

    `recovery_s`: seconds from the (last) fault to what the note says, the worst of all times.
    """

    number: int  # of the fault: the first column
    fault: str
    system: str
    database: str
    times: int
    requests: int
    lost: int
    twice: int
    recomputed: int
    recovery_s: float | None = None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    @property
    def key(self) -> tuple[int, str, str, str]:
        """Rows of one key replace each other; in the order of the table."""
        return (self.number, self.fault, self.database, self.system)

    def line(self) -> str:
        """A line of the Markdown table."""
        back = "" if self.recovery_s is None else f"{self.recovery_s:.1f} s"
        cells = [self.number, self.fault, self.database, self.system, self.times, self.requests]
        cells += [self.lost, self.twice, self.recomputed, back, self.note]
        return "| " + " | ".join(str(cell) for cell in cells) + " |"


class Report:
    """A pytest plugin: takes the row that a test hands in and writes it down at once.

    Rows of an earlier run of the same day stay where this run has none of the same key.
    """

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what a test handed in; also one that failed."""
        rows = [Row(**row) for name, row in report.user_properties if name == "fault"]
        if report.when == "call" and rows:
            date = datetime.now(UTC).date().isoformat()
            path = RESULTS / f"faults-{date}.json"
            merge(path, date, rows)
            write_page(path)


def merge(path: Path, date: str, rows: list[Row]) -> None:
    """Put rows into a result file."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    merged: dict[Any, Row] = {}
    for row in [*(Row(**old) for old in found.get("rows", [])), *rows]:
        # The short selection of a fault does not hide its full number of times.
        if row.key not in merged or merged[row.key].times <= row.times:
            merged[row.key] = row
    found = {
        "date": date,
        "command": "python -m tests.faults",
        "machine": describe(2),
        "rows": [merged[key].as_json() for key in sorted(merged)],
    }
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def table(rows: list[Row]) -> str:
    """The Markdown table."""
    return "\n".join([_HEAD, *(row.line() for row in sorted(rows, key=lambda row: row.key))])


def write_page(results: Path) -> None:
    """Put the table of a result file between the marks of docs/reference/faults.md."""
    found = json.loads(results.read_text(encoding="utf-8"))
    rows = [Row(**row) for row in found["rows"]]
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [f"{before}{BEGIN}", f"Measured on {found['date']}.", "", table(rows), f"{END}{after}"]
    PAGE.write_text("\n".join(lines), encoding="utf-8")

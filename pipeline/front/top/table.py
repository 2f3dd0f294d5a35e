"""Tables that fit a terminal: of a narrow one, the columns that matter least are left out."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

Row = Sequence[RenderableType]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    width: Characters. rank: Where the width does not suffice, the highest is left out first.
    """

    name: str
    width: int
    rank: int
    right: bool = False


def part(
    title: str, columns: Sequence[Column], rows: Sequence[Row], total: int, width: int
) -> list[RenderableType]:
    """Return a title and a table of at most `width` characters; `total` counts rows not shown."""
    if not total:
        return [_line(f"{title} (none)")]
    more = f" ({len(rows)} of {total:,})" if total > len(rows) else ""
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    fitting = _fitting(columns, width)
    for place in fitting:
        column = columns[place]
        table.add_column(
            column.name,
            width=min(column.width, width - 1),
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in rows:
        table.add_row(*(row[place] for place in fitting))
    return [_line(f"{title}{more}"), table]


def _line(text: str) -> Text:
    return Text(text, style="bold cyan", no_wrap=True, overflow="ellipsis")


def _fitting(columns: Sequence[Column], width: int) -> list[int]:
    """The places of the columns that fit beside each other; the first of them always."""
    kept = sorted(range(len(columns)), key=lambda place: columns[place].rank)
    while len(kept) > 1 and sum(columns[place].width + 1 for place in kept) > width:
        kept.pop()
    return sorted(kept)


def shared(lines: int, wanted: Sequence[int]) -> list[int]:
    """Divide lines among parts: each gets what it wants, or an equal share of what is left."""
    given = [0] * len(wanted)
    waiting = sorted(range(len(wanted)), key=lambda place: wanted[place])
    for served, place in enumerate(waiting):
        given[place] = min(wanted[place], lines // (len(waiting) - served))
        lines -= given[place]
    return given


def short(count: int) -> str:
    """A count in at most six characters, up to a trillion."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= 10 * size:
            return f"{count / size:.4g}{letter}"
    return str(count)


def span(seconds: float) -> str:
    """A time in at most six characters."""
    for size, least, letter in ((86_400, 2, "d"), (3_600, 2, "h"), (60, 2, "m")):
        if seconds >= least * size:
            count = seconds / size
            return f"{count:.1f}{letter}" if count < 1_000 else ">999" + letter
    return f"{max(0.0, seconds):.0f}s"

"""Shared by the commands that work on the database itself: opening it, and printing rows."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import typer

from nightjar.jobs.errors import JobError, StoreError, UnusableDatabaseError
from nightjar.pipeline.front.cli.console import EXIT_USAGE, check_driver, fail
from nightjar.pipeline.settings import Settings

if TYPE_CHECKING:
    from nightjar.jobs.store import Store


@contextmanager
def opened_store(settings: Settings) -> "Iterator[Store]":
    """Open the database; what cannot be done ends the command with its reason."""
    from nightjar.pipeline.queue.opening import open_store

    check_driver(settings)
    with closing(open_store(settings)) as store:
        try:
            yield store
        except (StoreError, UnusableDatabaseError):
            raise  # no mistake in the command: `main` gives it another status
        except JobError as error:
            fail(str(error), EXIT_USAGE)


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print rows in columns, with their names above; `-` stands for nothing."""
    texts = [tuple(columns), *[tuple(_cell(row[name]) for name in columns) for row in rows]]
    widths = [max(len(line[n]) for line in texts) for n in range(len(columns))]
    for line in texts:
        cells = (text.ljust(width) for text, width in zip(line, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


def shown(moment: datetime | None) -> str | None:
    """A moment as people and programs read it."""
    return None if moment is None else moment.isoformat(timespec="seconds")


def _cell(value: object) -> str:
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return "-" if value is None or value == "" else str(value)

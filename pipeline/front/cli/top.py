"""`nightjar top`: jobs, queues and GPU workers of a deployment, in a terminal."""

import signal
import time
from typing import TYPE_CHECKING, Annotated

import typer

from nightjar.pipeline.front.cli.console import read_settings
from nightjar.pipeline.front.cli.stored import opened_store

if TYPE_CHECKING:
    from rich.console import Console

    from nightjar.jobs.store import Store

_PRINTED_WIDTH, _PRINTED_LINES = 120, 1_000  # of a picture that no terminal bounds


def top(
    every: Annotated[
        float, typer.Option(min=0.5, max=3600.0, help="Seconds between two pictures.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture and end, as without a terminal.")
    ] = False,
) -> None:
    """Show open jobs, waiting micro-batches and GPU workers, again and again; Ctrl-C ends it.

    It reads the database of NIGHTJAR_DATABASE_URL, in bounded steps, and changes nothing. It needs
    no API. In the first picture, the rate of a job is that since its start.

    Exit status: 0 it was shown, 1 the database does not answer, 2 unusable arguments.

    Example: nightjar top --every 5
    """
    from rich.console import Console

    console = Console()
    printed = once or not console.is_terminal or console.is_dumb_terminal
    with opened_store(read_settings()) as store:
        if printed:
            _print(store, console)
            return
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # it gives the terminal back too
        try:
            _renew(store, console, every)
        except KeyboardInterrupt:
            return


def _print(store: "Store", console: "Console") -> None:
    from nightjar.pipeline.front.top.reading import rates, take
    from nightjar.pipeline.front.top.screen import screen

    if not console.is_terminal:
        console.width = _PRINTED_WIDTH
    snapshot = take(store)
    console.print(screen(snapshot, rates(None, snapshot), console.width, _PRINTED_LINES))


def _renew(store: "Store", console: "Console", every_s: float) -> None:
    """Show one picture after the other; a database that goes away is told until it is back."""
    from rich.live import Live

    from nightjar.jobs.errors import StoreUnavailableError
    from nightjar.pipeline.front.top.reading import rates, take
    from nightjar.pipeline.front.top.screen import screen

    shown, trouble = take(store), ""
    speed = rates(None, shown)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            picture = screen(shown, speed, console.width, console.height, trouble)
            live.update(picture, refresh=True)
            time.sleep(every_s)
            try:
                now = take(store)
            except StoreUnavailableError as error:
                trouble = f"not renewed: {error}"
                continue
            shown, speed, trouble = now, rates(shown, now), ""

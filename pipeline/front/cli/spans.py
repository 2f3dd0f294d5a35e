"""Spans of time as people write them on the command line."""

from datetime import timedelta

from nightjar.pipeline.front.cli.console import EXIT_USAGE, fail

_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


def parse_span(text: str) -> timedelta:
    """The span of a text such as 90d; one that cannot be read ends the command."""
    number, unit = text[:-1], _UNITS.get(text[-1:])
    if unit is None or not (number.isascii() and number.isdecimal()) or len(number) > 5:
        fail(f"{text!r} is no span of time: write a number and m, h or d, as in 90d", EXIT_USAGE)
    return timedelta(**{unit: int(number)})

"""How numbers, times and texts of strangers are written on a page.

Times are ages and durations by the clock of the server: the clock of a browser may be wrong.
"""

import re
import unicodedata
from datetime import UTC, datetime

# Characters that turn the direction of what follows, and so can make a text look like another.
_TURNING = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_STRANGE = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff{_TURNING}]")
_STEPS = ((86_400, "d"), (3_600, "h"), (60, "min"))
_UNITS = ("", " k", " M", " G")


def text(value: object) -> str:
    """A text of several lines, in which what cannot be seen is written out."""
    return _STRANGE.sub(_written_out, str(value))


def word(value: object) -> str:
    """The same in one line."""
    return text(value).replace("\n", "␊").replace("\t", "␉")


def _written_out(found: re.Match[str]) -> str:
    letter = found[0]
    if ord(letter) < 0x20:
        return chr(0x2400 + ord(letter))  # the picture of a control character, such as ␛
    return f"⟨{unicodedata.name(letter, f'U+{ord(letter):04X}').lower()}⟩"


def cut(value: object, most: int) -> str:
    """The beginning of a text."""
    whole = str(value)
    return whole if len(whole) <= most else f"{whole[:most]}…"


def number(value: float) -> str:
    """A count with separators of thousands."""
    return f"{value:,.0f}"


def short(value: float) -> str:
    """A large number in three digits, such as 1.53 M."""
    power = 0
    while abs(value) >= 999.5 and power < len(_UNITS) - 1:
        value /= 1000
        power += 1
    if power == 0:
        return f"{value:.0f}"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}{_UNITS[power]}"


def rate(value: float | None) -> str:
    """Rows a second, in a unit in which it is no small fraction."""
    if value is None:
        return "–"
    if value >= 10:
        return f"{number(value)}/s"
    if value >= 1:
        return f"{value:.1f}/s"
    return f"{value * 60:.1f}/min" if value * 60 >= 1 else f"{value * 3600:.1f}/h"


def duration(seconds: float | None) -> str:
    """A duration in its two largest units."""
    if seconds is None:
        return "–"
    left = max(0, round(seconds))
    for place, (size, unit) in enumerate(_STEPS):
        if left >= size:
            if place + 1 < len(_STEPS):
                smaller, name = _STEPS[place + 1]
                return f"{left // size} {unit} {left % size // smaller} {name}"
            return f"{left // size} {unit} {left % size} s"
    return f"{left} s"


def age(moment: datetime | None) -> str:
    """How long ago a moment is, in one unit, so that it seldom changes."""
    if moment is None:
        return "–"
    seconds = max(0.0, (datetime.now(UTC) - moment).total_seconds())
    for size, unit in _STEPS:
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return "just now" if seconds < 15 else "< 1 min ago"


def until(moment: datetime | None) -> str:
    """How long it is until a moment, in its two largest units."""
    if moment is None:
        return "–"
    seconds = (moment - datetime.now(UTC)).total_seconds()
    return f"in {duration(seconds)}" if seconds >= 1 else "now"


def silence(moment: datetime) -> str:
    """How long ago a moment is, to the second."""
    return duration((datetime.now(UTC) - moment).total_seconds())


def moment(value: datetime | None) -> str:
    """A moment in UTC."""
    return "–" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def percent(part: float, whole: float) -> str:
    """A share; one that is not whole is never written as 100%."""
    if whole <= 0:
        return "–"
    if part >= whole or part <= 0:
        return "100%" if part > 0 else "0%"
    return f"{min(part / whole * 100, 99.9):.1f}%"

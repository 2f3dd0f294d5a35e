"""What a check finds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from nightjar.pipeline.settings import Settings


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"  # works now; will fail, be slow, or be open to others
    FAULT = "fault"  # does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding; `mend` says how to correct it, and is empty where nothing is wrong."""

    check: str
    level: Level
    message: str
    mend: str = ""


Check = Callable[[Settings], Iterable[Finding]]


def ok(check: str, message: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check, Level.OK, message)


def warning(check: str, message: str, mend: str) -> Finding:
    """It works now."""
    return Finding(check, Level.WARNING, message, mend)


def fault(check: str, message: str, mend: str) -> Finding:
    """It does not work."""
    return Finding(check, Level.FAULT, message, mend)

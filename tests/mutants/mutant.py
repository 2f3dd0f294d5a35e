"""What a mutant is, and what became of it."""

from dataclasses import dataclass, field
from enum import StrEnum


class Fate(StrEnum):
    """What the tests made of a mutant."""

    CAUGHT = "caught"
    TIMED_OUT = "timed out"  # counts as caught
    SURVIVED = "survived"
    LINE_CHANGED = "line changed"  # survived an earlier run; counts as not caught
    NOT_RUN = "not run"  # the budget ended before


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault in one module.

    Attributes:
        module: Path of the module from the root.
        where: Qualified name of the function around the change, or `module`.
        before: The changed lines as they were, joined by ` / `.
        after: The same lines in the mutant; empty where they are gone.
        line: Where the change begins.
        operator: The kind of change.
        source: The whole text of the mutated module.
    """

    module: str
    where: str
    before: str
    after: str
    line: int
    operator: str = field(compare=False)
    source: str = field(compare=False, repr=False)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What an explanation names; the number of the line is not part of it."""
        return self.module, self.where, self.before, self.after


@dataclass(frozen=True, slots=True)
class Trial:
    """A mutant and its fate.

    Attributes:
        by: The test that caught it, where one failed.
    """

    mutant: Mutant
    fate: Fate
    by: str = ""
    seconds: float = 0.0

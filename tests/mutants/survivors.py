"""Why a mutant survives: survivors.toml, read and matched.

An entry names its mutant by module, function and changed line, not by number of line. One entry
holds for every mutant of that function that changes such a line in that way.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import Mutant

FILE = Path(__file__).with_name("survivors.toml")


@dataclass(frozen=True, slots=True)
class Explanation:
    """One entry of the file; `where` is the qualified function or `module`."""

    module: str
    where: str
    before: str
    after: str
    why: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What it has in common with its mutant."""
        return self.module, self.where, self.before, self.after


def read(file: Path = FILE) -> list[Explanation]:
    """Every entry.

    Raises:
        ValueError: An entry says nothing, stands there twice, or has wrong fields.
    """
    entries = tomllib.loads(file.read_text(encoding="utf-8")).get("survivor", [])
    found: dict[tuple[str, str, str, str], Explanation] = {}
    for number, entry in enumerate(entries, start=1):
        try:
            explanation = Explanation(**entry)
        except TypeError as error:
            raise ValueError(f"{file.name}, entry {number}: {error}") from error
        if not explanation.why.strip():
            raise ValueError(f"{file.name}, entry {number}: `why` is empty")
        if explanation.key in found:
            raise ValueError(f"{file.name}, entry {number}: explained twice: {explanation.before}")
        found[explanation.key] = explanation
    return list(found.values())


def why(mutant: Mutant, explanations: Sequence[Explanation]) -> str | None:
    """The explanation of a mutant, if there is one."""
    return next((each.why.strip() for each in explanations if each.key == mutant.key), None)


def of_lines_gone(explanations: Sequence[Explanation], root: Path) -> list[Explanation]:
    """Those whose line is in no module any more: they explain nothing."""
    return [each for each in explanations if not _stands(each, root)]


def _stands(explanation: Explanation, root: Path) -> bool:
    file = root / explanation.module
    if not file.is_file():
        return False
    lines = {line.strip() for line in file.read_text(encoding="utf-8").splitlines()}
    return all(line in lines for line in explanation.before.split(" / ")) or (
        explanation.before in lines
    )

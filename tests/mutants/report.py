"""What became of the mutants, as a page."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import groupby

from tests.mutants.mutant import Fate, Mutant, Trial
from tests.mutants.survivors import Explanation, why

LEAST_SHARE = 0.85
UNEXPLAINED = "not explained yet"
_AGAIN = "Survivors without an explanation were run again"
_CAUGHT_BEFORE = re.compile(r"whole run had caught (\d+)")
CHANGED = "Not run again, as the line has changed since. It counts as not caught."
_INTRODUCTION = """\
# Mutants

`make test-mutants` plants one small fault after the other in `jobs/store`, the pipeline and the
worker. It runs the tests that belong to the module and counts the faults that no test notices. At
least {least:.0%} must be caught, and each survivor is explained in
`tests/mutants/survivors.toml`.

- A fault is one of these: a comparison turned round or moved by one; a number one higher or lower;
  a condition, clause, operand, element or statement left out; `True` for `False`; `min` for `max`;
  an `except` that catches nothing.
- Left alone are logging, annotations, texts, what errors say, decorators, and sizes of 10 or more.
- Each module has a sample. It stays the same as long as the module's lines do.
- `tests/mutants/table.py` says which test files belong to which module. Tests marked `slow` do not
  run, nor does the fault suite.
- The tests run on SQLite. A mutant that survives there must survive them on PostgreSQL, too.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All trials of a run, with what explains the survivors."""

    trials: Sequence[Trial]
    explanations: Sequence[Explanation]
    stale: Sequence[Explanation] = ()

    @property
    def tried(self) -> int:
        """Mutants that ran."""
        return sum(trial.fate is not Fate.NOT_RUN for trial in self.trials)

    @property
    def caught(self) -> int:
        """Those that a test noticed, by failing or by taking too long."""
        return sum(trial.fate in (Fate.CAUGHT, Fate.TIMED_OUT) for trial in self.trials)

    @property
    def share(self) -> float:
        """Caught of those that ran; 0 if none did."""
        return self.caught / self.tried if self.tried else 0.0

    @property
    def survivors(self) -> list[Mutant]:
        """In the order of modules and lines."""
        found = [trial.mutant for trial in self.trials if trial.fate is Fate.SURVIVED]
        return sorted(found, key=lambda mutant: (mutant.module, mutant.line, mutant.after))

    @property
    def unexplained(self) -> list[Mutant]:
        """Survivors without an entry."""
        return [mutant for mutant in self.survivors if why(mutant, self.explanations) is None]

    @property
    def changed(self) -> list[Mutant]:
        """Survivors of an earlier run whose lines have changed."""
        return [trial.mutant for trial in self.trials if trial.fate is Fate.LINE_CHANGED]

    @property
    def faults(self) -> list[str]:
        """Why the run fails; empty if it does not."""
        found = []
        if self.share < LEAST_SHARE:
            found.append(f"{self.share:.1%} caught, {LEAST_SHARE:.0%} are wanted")
        if self.unexplained:
            found.append(f"{len(self.unexplained)} survivors are not explained in survivors.toml")
        if self.stale:
            found.append(f"{len(self.stale)} explanations are of lines that are gone")
        return found


def whole_run(*, command: str, on: date, facts: Mapping[str, str]) -> str:
    """How a run was made, in Markdown."""
    told = "".join(f"{name}: {value}. " for name, value in facts.items()).rstrip()
    return f"Run on {on.isoformat()} by `{command}`.\n{told}\n"


def run_again(past: str, *, page: str, on: date, caught: int) -> str:
    """The same after a run of the survivors of an earlier one.

    Args:
        past: How that one was made. It may have been such a run itself.
        page: The page's path.
        on: The day of this one.
        caught: How many mutants the earlier one had caught.
    """
    first, _, again = past.partition(_AGAIN)
    before = _CAUGHT_BEFORE.search(again)
    return (
        f"{first.rstrip()}\n\n{_AGAIN}, the last ones on {on.isoformat()},\n"
        f"by `python -m tests.mutants --survivors-of {page}`, some modules at a time.\n"
        f"The whole run had caught {before[1] if before else caught}; the table counts those that "
        "are caught now.\n"
    )


def page(outcome: Outcome, *, how: str) -> str:
    """The page in Markdown; `how` says how the run was made."""
    parts = [
        _INTRODUCTION.format(least=LEAST_SHARE),
        how,
        *_table(outcome),
        "",
        "## Survivors",
        "",
        *_survivors(outcome),
    ]
    if outcome.stale:
        parts += ["## Explanations of lines that are gone", ""]
        parts += [f"- {each.module}, {each.where}: {_code(each.before)}" for each in outcome.stale]
    return "\n".join(parts).rstrip() + "\n"


def _table(outcome: Outcome) -> list[str]:
    lines = ["| module | mutants | caught | of these timed out | share |", "|---|---|---|---|---|"]
    named = [trial for trial in outcome.trials if trial.mutant.module]
    ordered = sorted(named, key=lambda trial: trial.mutant.module)
    for module, trials in groupby(ordered, key=lambda trial: trial.mutant.module):
        lines.append(_row(module, Outcome(list(trials), ())))
    lines.append(_row("**all**", outcome))
    if skipped := len(outcome.trials) - outcome.tried:
        lines += ["", f"{skipped} more mutants were not run: the budget of time had ended."]
    return lines


def _row(name: str, outcome: Outcome) -> str:
    late = sum(trial.fate is Fate.TIMED_OUT for trial in outcome.trials)
    share = f"{outcome.share:.0%}" if outcome.tried else "-"
    return f"| {name} | {outcome.tried} | {outcome.caught} | {late} | {share} |"


def _survivors(outcome: Outcome) -> list[str]:
    survivors = [*outcome.survivors, *outcome.changed]
    if not survivors:
        return ["None."]
    lines = []
    for mutant in survivors:
        told = why(mutant, outcome.explanations) or f"**{UNEXPLAINED}**"
        if mutant in outcome.changed:
            told = CHANGED
        lines += [
            f"- {mutant.module}, {mutant.where} ({mutant.operator}): {' '.join(told.split())}",
            "",
            "  ```diff",
            *(f"  - {line}" for line in mutant.before.split(" / ") if line),
            *(f"  + {line}" for line in mutant.after.split(" / ") if line),
            "  ```",
        ]
    return [*lines, ""]


def _code(text: str) -> str:
    return f"``{text}``"


def as_entry(mutant: Mutant) -> str:
    """What to put into survivors.toml, with the reason left to write."""
    fields = {
        "module": mutant.module,
        "where": mutant.where,
        "before": mutant.before,
        "after": mutant.after,
        "why": "",
    }
    return "\n".join(["[[survivor]]", *(f"{k} = {_toml(v)}" for k, v in fields.items())])


def _toml(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'

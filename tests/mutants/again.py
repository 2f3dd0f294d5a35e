"""Run a page's survivors again: what the page says of a whole run, and which of them still stand.

The others are not run again. Those that were caught stay counted as caught. A survivor whose line
has changed stays counted as not caught.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.mutants.mutant import Fate, Mutant, Trial
from tests.mutants.survivors import Explanation, why

_RUN = re.compile(r"^Run on .*?\n(?=\n\|)", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| ([\w/]+\.py) \| (\d+) \| (\d+) \| (\d+) \|", re.MULTILINE)
_NOT_RUN = re.compile(r"^(\d+) more mutants were not run", re.MULTILINE)
_SURVIVOR = re.compile(
    r"^- (\S+), (\S+) \((\w+)\): .*\n\n  ```diff\n((?:  [-+] .*\n)+)  ```$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Past:
    """What a page says.

    Attributes:
        told: How it was run, in Markdown.
        trials: One for each mutant. Only a survivor's says more than its module.
    """

    told: str
    trials: Sequence[Trial]

    @property
    def survivors(self) -> list[Mutant]:
        """Without the texts of their modules, which no page has."""
        return [trial.mutant for trial in self.trials if trial.fate is Fate.SURVIVED]


def read(text: str) -> Past:
    """Read a page; raises ValueError if its numbers do not add up."""
    ran = _RUN.search(text)
    if ran is None:
        raise ValueError("the page does not say how it was run")
    trials = [Trial(mutant, Fate.SURVIVED) for mutant in _survivors(text)]
    survived = Counter(trial.mutant.module for trial in trials)
    for module, tried, caught, late in _ROW.findall(text):
        if int(tried) - int(caught) != survived[module]:
            raise ValueError(f"{module}: the table and the list of survivors differ")
        fates = [Fate.TIMED_OUT] * int(late) + [Fate.CAUGHT] * (int(caught) - int(late))
        trials += [Trial(_unnamed(module), fate) for fate in fates]
    if skipped := _NOT_RUN.search(text):
        trials += [Trial(_unnamed(""), Fate.NOT_RUN)] * int(skipped[1])
    return Past(ran[0], trials)


def unexplained(mutants: Sequence[Mutant], explanations: Sequence[Explanation]) -> list[Mutant]:
    """Those that a test may catch by now."""
    return [mutant for mutant in mutants if why(mutant, explanations) is None]


def joined(past: Past, stand: Sequence[Mutant], trials: Sequence[Trial]) -> list[Trial]:
    """All trials of the page, with the new fates of those that ran again."""
    new = {trial.mutant.key: trial for trial in trials if trial.fate is not Fate.NOT_RUN}
    there = {mutant.key: mutant for mutant in stand}
    result = []
    for trial in past.trials:
        key = trial.mutant.key
        if trial.fate is not Fate.SURVIVED or key in new:
            result.append(new.get(key, trial))
        elif key in there:
            result.append(Trial(there[key], Fate.SURVIVED))
        else:
            result.append(Trial(trial.mutant, Fate.LINE_CHANGED))
    return result


def _survivors(text: str) -> Iterator[Mutant]:
    for number, (module, where, operator, diff) in enumerate(_SURVIVOR.findall(text)):
        lines = [line.strip() for line in diff.splitlines()]
        before, after = (
            " / ".join(line[2:] for line in lines if line.startswith(sign)) for sign in "-+"
        )
        # The page names no line; the number keeps the page's order.
        yield Mutant(module, where, before, after, number, operator, "")


def _unnamed(module: str) -> Mutant:
    return Mutant(module, "", "", "", 0, "", "")

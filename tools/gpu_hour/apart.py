"""Test files, each in a process of its own: a crash or a hang ends one file and not all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from .recorder import FILE, read_results

ROOT = Path(__file__).resolve().parents[2]

MOST_STARTS = 6
"""Processes of one file: after a crash another one runs the tests that are left."""

NO_TESTS = 5
"""pytest's exit status where it found none."""

LOG_CHARACTERS = 20_000
"""Of each process's output, from its end."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tests that share a process: one file, as a rule.

    name: for the page; arguments: of pytest, the tests and marks; alone: nothing else may use the
    GPU meanwhile.
    """

    name: str
    arguments: tuple[str, ...]
    alone: bool = False


@dataclass(slots=True)
class Outcome:
    """What became of a group.

    passed, skipped: how many tests; failed: the name of each with its error, in order; not_run:
    names of tests that were not reached; note: why not, or why a process ended.
    """

    name: str
    passed: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    not_run: list[str] = field(default_factory=list)
    note: str = ""
    seconds: float = 0.0
    log: str = ""

    @property
    def is_good(self) -> bool:
        """Whether there were tests, and all of them passed."""
        return self.passed > 0 and not (self.failed or self.not_run or self.skipped or self.note)


def run_groups(
    groups: Sequence[Group],
    *,
    jobs: int,
    ends: float,
    test_s: float,
    prefix: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    tell: Callable[[Outcome], object] = lambda outcome: None,
) -> list[Outcome]:
    """Run groups, first those that must be alone; returns their outcomes in the given order.

    jobs: processes at a time; ends: time.monotonic() at which everything is over; test_s: of one
    test; prefix: put before Python's command; tell: called as each group ends.
    """

    def one(group: Group) -> Outcome:
        outcome = run_group(group, ends, test_s, prefix, environment)
        tell(outcome)
        return outcome

    found = {group.name: one(group) for group in groups if group.alone}
    with ThreadPoolExecutor(jobs) as pool:
        rest = [group for group in groups if not group.alone]
        found |= {outcome.name: outcome for outcome in pool.map(one, rest)}
    return [found[group.name] for group in groups]


def run_group(
    group: Group,
    ends: float,
    test_s: float,
    prefix: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Outcome:
    """Run a group to its end, in as many processes as its crashes need."""
    outcome, started = Outcome(group.name), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nightjar-tests-") as folder:
        results = Path(folder) / "results"
        command = [*prefix, *_pytest(group, test_s)]
        for _ in range(MOST_STARTS):
            left = ends - time.monotonic()
            if left <= 0:
                outcome.note = outcome.note or "no time left"
                break
            status = _run(command, results, left, outcome, environment)
            if _judge(outcome, results, status):
                break
        _count(outcome, results)
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


def _pytest(group: Group, test_s: float) -> list[str]:
    """-W default: versions that a bare machine happens to have may warn of anything.

    No plugin is loaded but the recorder and pytest-timeout (see _run).
    """
    command = [sys.executable, "-m", "pytest", "-W", "default", "-p", "no:cacheprovider", "-q"]
    command += ["--tb=short", "-p", "tools.gpu_hour.recorder", *group.arguments]
    if find_spec("pytest_timeout") is not None:
        # A signal cannot end a wait inside the driver; a thread ends the process.
        command += ["-p", "pytest_timeout", f"--timeout={test_s:g}", "--timeout-method=thread"]
    return command


def _run(
    command: Sequence[str],
    results: Path,
    limit_s: float,
    outcome: Outcome,
    environment: dict[str, str] | None,
) -> int | None:
    """One process; returns its status, or None if it was killed for being late."""
    given = os.environ | (environment or {}) | {FILE: str(results), "PYTHONPATH": _path()}
    given["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # whatever else the machine has
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=given,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    late = False
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
    text = said.decode(errors="replace")
    outcome.log += f"$ {' '.join(command)}\n{text[-LOG_CHARACTERS:]}\n"
    return None if late else process.returncode


def _path() -> str:
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def _judge(outcome: Outcome, results: Path, status: int | None) -> bool:
    """Whether the group is done; a test in which the process ended has failed by that."""
    found = read_results(results)
    ended = {one["ended"] for one in found if "ended" in one}
    began = [one["began"] for one in found if "began" in one]
    hung = [name for name in began if name not in ended]
    for name in hung:
        _append(results, name, "it was not finished in time" if status is None else _how(status))
    if status is None:
        outcome.note = "no time left"
        return True
    # pytest ran to its end, or found no test; unless a time limit ended the process inside one.
    if status in (0, 1, NO_TESTS) and not hung:
        return True
    collected = {name for one in found for name in one.get("collected", ())}
    if not collected:
        if not any("broken" in one for one in found):
            outcome.note = f"{_how(status)}, before any test"
        return True
    if not collected <= ended | set(hung):
        return False
    outcome.note = f"the last process ended with status {status}"
    return True


def _append(results: Path, name: str, error: str) -> None:
    """As the recorder would have written it, had the process lived."""
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"ended": name, "outcome": "failed", "error": error}) + "\n")


def _how(status: int) -> str:
    if status >= 0:
        return f"the process ended with status {status} here (a test's time limit, or a crash)"
    return f"the process was ended by {signal.Signals(-status).name} here"


def _count(outcome: Outcome, results: Path) -> None:
    """Fill in the numbers from everything that was written."""
    found = read_results(results)
    collected = list(dict.fromkeys(name for one in found for name in one.get("collected", ())))
    by_name = {one["ended"]: one for one in found if "ended" in one}
    outcome.failed |= {one["broken"]: one["error"] for one in found if "broken" in one}
    for name, one in by_name.items():
        if one["outcome"] == "failed":
            outcome.failed[name] = one["error"]
        elif one["outcome"] == "skipped":
            outcome.skipped += 1
        else:
            outcome.passed += 1
    outcome.not_run = [name for name in collected if name not in by_name]
    if not collected and not outcome.failed and not outcome.note:
        outcome.note = "no test was found"

"""Run the tests for one mutant after the other, each in a fork of this process.

Started as a script in a copy of the tree. What the tests need of other packages is imported once;
nothing of the tree is, so that each fork reads the mutant. Each line of the standard input is a
request, each line of the standard output its answer (`Request`, `Answer`).
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import psutil
import pytest

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# A mutant may well ask for all memory there is, or write for ever.
_MOST_MEMORY_BYTES = 6 << 30
_MOST_FILE_BYTES = 2 << 30
_LAST_OUTPUT = 3_000
# A test may take so many times what it took before, and this much more.
_SLOWER, _SLACK_S = 5.0, 8.0


@dataclass(frozen=True, slots=True)
class Request:
    """Which tests to run.

    Attributes:
        files: Test files, from the root of the copy.
        database: `sqlite` for every test that needs no PostgreSQL, `postgresql` for the others.
        folder: Where temporary files go.
        limit_s: Most seconds for all of them.
        seconds: What each test took unmutated; only these run, quick ones first. None: all run,
            in their order, and bytecode is kept.
    """

    files: list[str]
    database: str
    folder: str
    limit_s: float
    seconds: dict[str, float] | None = None


@dataclass(slots=True)
class Answer:
    """What became of them.

    Attributes:
        code: pytest's exit code; None if they were ended at the limit.
        seconds: What each test took.
        failed: The first test that failed.
        foreign: A module of the tree that was imported from elsewhere.
        output: The end of what was printed.
    """

    code: int | None
    wall_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    foreign: str = ""
    output: str = ""


class Selection:
    """A pytest plugin: chooses tests, orders them, takes their times."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.seconds: dict[str, float] = {}
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out the tests of the other database and those that were not timed."""
        known, wants_postgres = self._request.seconds, self._request.database == "postgresql"
        chosen = [item for item in items if needs_postgres(item) == wants_postgres]
        if known is not None:
            chosen = [item for item in chosen if item.nodeid in known]
            _in_order(chosen, known)
            for item in chosen:
                limit_s = _SLACK_S + _SLOWER * known[item.nodeid]
                if config.pluginmanager.hasplugin("timeout"):
                    item.add_marker(pytest.mark.timeout(limit_s), append=False)
        left_out = set(items) - set(chosen)
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up set-up, call and tear-down."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and not self.failed:
            self.failed = report.nodeid


def needs_postgres(item: pytest.Item) -> bool:
    """Whether the test asks for a PostgreSQL, by a fixture or as one of its cases."""
    cases = getattr(getattr(item, "callspec", None), "params", {}).values()
    fixtures = getattr(item, "fixturenames", ())
    return "postgresql" in [case for case in cases if isinstance(case, str)] or any(
        name.startswith("postgres") for name in fixtures
    )


def _in_order(items: list[pytest.Item], known: dict[str, float]) -> None:
    """Files of quick tests first, the quickest test of a file first.

    A file's tests stay together, since fixtures of a file are made once. Its median counts: a
    single long test, which comes last, does not keep a file of short ones waiting.
    """
    of_file: dict[str, list[float]] = {}
    for item in items:
        of_file.setdefault(item.nodeid.partition("::")[0], []).append(known[item.nodeid])
    medians = {file: statistics.median(seconds) for file, seconds in of_file.items()}

    def rank(item: pytest.Item) -> tuple[float, str, float]:
        file = item.nodeid.partition("::")[0]
        return medians[file], file, known[item.nodeid]

    items.sort(key=rank)


def run(request: Request) -> Answer:
    """Run the tests in a fork and end whatever they leave behind."""
    folder = Path(request.folder)
    folder.mkdir(parents=True, exist_ok=True)
    told, output = folder / "answer.json", folder / "output.txt"
    told.unlink(missing_ok=True)
    began = time.monotonic()
    runner = os.getpid()
    child = os.fork()
    if child == 0:
        _be_the_tests(runner, request, told, output)
    code = _wait(child, began + request.limit_s)
    _end_all_below()
    answer = Answer(code, time.monotonic() - began)
    if told.exists():
        found = json.loads(told.read_text(encoding="utf-8"))
        answer.seconds, answer.failed = found["seconds"], found["failed"]
        answer.foreign = found["foreign"]
    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    answer.output = text[-_LAST_OUTPUT:]
    return answer


def _be_the_tests(runner: int, request: Request, told: Path, output: Path) -> None:
    """The fork's life; does not return."""
    code = 70
    try:
        os.setsid()
        _tell_linux(_PR_SET_PDEATHSIG, signal.SIGKILL)  # does not outlive the runner
        if os.getppid() != runner:  # which ended before it could be told
            os._exit(code)
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_MOST_FILE_BYTES, _MOST_FILE_BYTES))
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        if request.seconds is not None:
            # A mutant's bytecode must not be taken for that of the next.
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        _make_hypothesis_repeat_itself()
        selection = Selection(request)
        code = int(pytest.main(_arguments(request), plugins=[selection]))
        found: dict[str, Any] = {
            "seconds": selection.seconds,
            "failed": selection.failed,
            "foreign": _foreign(),
        }
        told.write_text(json.dumps(found), encoding="utf-8")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def _arguments(request: Request) -> list[str]:
    arguments = ["-x", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    # What its plugins are made of is imported already, and none of it holds a test.
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "--tb=short"]
    return [*arguments, f"--basetemp={request.folder}/tests", *request.files]


def _make_hypothesis_repeat_itself() -> None:
    """The same examples for each mutant as without one, and none made simpler."""
    with contextlib.suppress(ImportError):
        from hypothesis import Phase, settings  # noqa: PLC0415  # pytest loads its plugin first

        settings.register_profile(
            "mutants",
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.explicit, Phase.generate),
        )
        settings.load_profile("mutants")


def _foreign() -> str:
    """A module with one of the tree's names that does not lie in it."""
    root = str(Path.cwd())
    own = {path.name for path in Path(root).iterdir() if (path / "__init__.py").exists()}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in own and file and not str(Path(file)).startswith(root):
            return f"{name} from {file}"
    return ""


def _wait(child: int, deadline: float) -> int | None:
    """The exit code of the tests; None, and their end, at the deadline."""
    pause = 0.005
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)


def _end_all_below() -> None:
    """End every process that the tests started; all of them are below this one."""
    while below := psutil.Process().children(recursive=True):
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=5)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _tell_linux(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _plugins() -> list[str]:
    """The modules of the plugins that pytest will load."""
    return [entry.module for entry in entry_points(group="pytest11")]


def main() -> None:
    """Answer requests until there are no more."""
    _tell_linux(_PR_SET_CHILD_SUBREAPER, 1)  # whoever loses a parent becomes a child of this one
    sys.path[0] = str(Path.cwd())
    plugins = [] if "PYTEST_DISABLE_PLUGIN_AUTOLOAD" in os.environ else _plugins()
    for name in [*sys.argv[1:], *plugins]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")  # what is printed goes elsewhere
    os.dup2(2, 1)
    for line in sys.stdin:
        answer = run(Request(**json.loads(line)))
        answers.write(json.dumps(asdict(answer)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

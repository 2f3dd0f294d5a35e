"""The five stages: what each runs, in which order."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import counters
from .apart import ROOT, Group, Outcome, run_groups
from .page import Page

STAGE_S = 540.0
"""Of a stage: machines are often rented for commands of ten minutes."""

END_S = 20.0
"""Of it, to write the page."""

TEST_S = 120.0
"""Of one test.  The longest records graphs of many shapes."""

SANITIZED_TEST_S = 240.0
PLANTED_S = 120.0
"""Of the program with a planted bug that a sanitizer must find."""

ALONE = ("tests/gpu/test_memory.py",)
"""Files that measure what the whole GPU has left."""


OF_TWO_GPUS = ("test_ranks.py",)
"""Files that one GPU can only skip."""


@dataclass(frozen=True, slots=True)
class Run:
    """How the stages are run.

    dry: without a GPU, the kernels on the CUDA-on-CPU host; cubins: folder of prebuilt kernels;
    jobs: test processes at a time; limit_s: of the stage; tell: called with each line of progress.
    """

    dry: bool
    out: Path
    cubins: Path
    jobs: int
    limit_s: float
    tell: Callable[[str], object]

    @property
    def marks(self) -> tuple[str, ...]:
        """pytest's selection: what needs a GPU, or what the host runs in its place."""
        return ("-m", "not gpu and not slow" if self.dry else "gpu")


@dataclass(frozen=True, slots=True)
class Stage:
    """title: for the page; fill: does the work until time.monotonic() is `ends`."""

    title: str
    fill: Callable[[Run, Page, float], None]


def files(folder: str, run: Run, leave_out: tuple[str, ...] = ()) -> list[Group]:
    """A group for each test file of a folder, in the order of their names."""
    found = sorted((ROOT / "tests" / folder).glob("test_*.py"))
    names = [str(path.relative_to(ROOT)) for path in found]
    return [
        Group(name, (name, *run.marks), name in ALONE and not run.dry)
        for name in names
        if Path(name).name not in leave_out
    ]


def _run(
    run: Run,
    page: Page,
    groups: list[Group],
    ends: float,
    tool: tuple[str, str] | None = None,
) -> None:
    """tool: the sanitizer's program and the tool of it that watches the tests."""
    from tests.gpu.sanitizer import ENVIRONMENT, prefix  # noqa: PLC0415

    def tell(outcome: Outcome) -> None:
        state = "passed" if outcome.is_good else "NOT ALL PASSED"
        run.tell(f"{outcome.name}: {outcome.passed} passed, {state}, {outcome.seconds:.0f} s")

    given = run_groups(
        groups,
        jobs=run.jobs,
        ends=ends,
        test_s=TEST_S if tool is None else SANITIZED_TEST_S,
        prefix=() if tool is None else prefix(*tool),
        environment={} if tool is None else ENVIRONMENT,
        tell=tell,
    )
    page.tests([_judged(one, run) for one in given])


def _judged(outcome: Outcome, run: Run) -> Outcome:
    """Without a GPU a file may hold nothing but tests that need one."""
    if run.dry and outcome.note == "no test was found":
        outcome.note = ""
    return outcome


def kernels(run: Run, page: Page, ends: float) -> None:
    """Versions, the schema of flash attention, cubins, kernel tests."""
    from .machine import flash_attention_fault, prebuilt, versions  # noqa: PLC0415

    page.text += [*versions(), ""]
    if fault := flash_attention_fault():
        page.faults.append(fault)
    said, complete = prebuilt(run)
    # Its own page, where it wrote one, is the end of what it printed.
    page.text += [said[max(0, said.find("# GPU figures")) :], ""]
    if not complete:
        page.faults.append(said)
    leave_out = ("test_kernel_budget.py", "test_planted_bugs.py")  # the compiler's and the host's
    _run(run, page, files("kernels_cuda", run, leave_out), ends)


def engine(run: Run, page: Page, ends: float) -> None:
    """The engine on the kernels, beside the CPU's answers and transformers'."""
    from .machine import gpus  # noqa: PLC0415

    leave_out: tuple[str, ...] = ("test_sanitizer.py",)
    if not run.dry and (found := gpus()) < 2:
        leave_out += OF_TWO_GPUS
        page.text += [f"{found} GPU: left out is what needs two, {', '.join(OF_TWO_GPUS)}.", ""]
    groups = files("engine_cuda", run) + files("gpu", run, leave_out)
    _run(run, page, groups, ends)


def figures(run: Run, page: Page, ends: float) -> None:
    """Every figure beside its goal."""
    limit_s = ends - time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(run.out.resolve())]
    command += ["--limit-s", f"{limit_s - 15:.0f}"]
    if run.dry:
        names = "machine,decode_attention_1,decode_1,prefill,ranking"
        command += ["--device", "cpu", "--scale", "tiny", "--only", names]
    _program(page, command, limit_s)


def causes(run: Run, page: Page, ends: float) -> None:
    """A decode step with and without each part; the hardware's counters."""
    from benchmarks.gpu.causes import page as table_of_causes  # noqa: PLC0415
    from benchmarks.gpu.runner import Worker  # noqa: PLC0415
    from benchmarks.gpu.runner import run as measure  # noqa: PLC0415
    from benchmarks.gpu.targets import CAUSES  # noqa: PLC0415

    profile_s = 0.0 if run.dry else 120.0
    device, scale = ("cpu", "tiny") if run.dry else ("cuda", "full")
    chosen = [
        (name, 10 * one.budget_s if run.dry else one.budget_s) for name, one in CAUSES.items()
    ]

    def wrote(_: object, results: dict[str, dict[str, object]]) -> None:
        name, one = list(results.items())[-1]
        run.tell(f"{name}: {one['status']}")

    left = ends - time.monotonic() - profile_s
    results = measure(Worker(device, scale), chosen, left, wrote)
    page.text += [table_of_causes(results), ""]
    for name, one in results.items():
        if one["status"] != "measured":
            page.faults.append(f"{name}: {one['status']}")
            page.log += f"{name}:\n{one.get('reason', '')}\n"
    if not run.dry:
        page.text += [counters.table(min(profile_s, ends - time.monotonic())), ""]


def memory_checks(run: Run, page: Page, ends: float) -> None:
    """memcheck and racecheck of compute-sanitizer; without a GPU the host's own checks."""
    from tests.gpu import sanitizer  # noqa: PLC0415

    names = sorted({node.partition("::")[0] for node in sanitizer.NODES})
    nodes = {name: [n for n in sanitizer.NODES if n.startswith(f"{name}::")] for name in names}
    groups = [Group(name, (*nodes[name], *run.marks)) for name in names]
    if run.dry:
        _run(run, page, groups, ends)
        return
    program = sanitizer.find()
    if program in (None, sanitizer.OFF):
        page.faults.append("compute-sanitizer was not found: nothing was checked")
        return
    tools = ("memcheck", "racecheck")
    for number, tool in enumerate(tools):
        left = ends - time.monotonic()
        over = ends - left * (len(tools) - 1 - number) / (len(tools) - number)
        planted = ["-m", "tests.gpu.planted", tool]
        found = sanitizer.run(program, tool, planted, min(PLANTED_S, left))
        page.log += found.summary
        # Else a clean run would show nothing.
        if "SUMMARY" not in found.output or not found.errors_found:
            page.faults.append(f"{tool} did not find its planted bug: it does not work here")
        named = [Group(f"{tool}: {one.name}", one.arguments) for one in groups]
        _run(run, page, named, over, tool=(program, tool))


def _program(page: Page, command: list[str], limit_s: float) -> None:
    """Run a program; its output goes to the page and to the log."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
        said = done.stdout.decode(errors="replace")
        if done.returncode:
            page.faults.append(f"{command[2]} ended with status {done.returncode}: see below")
    except subprocess.TimeoutExpired as late:
        said = bytes(late.stdout or b"").decode(errors="replace")
        page.faults.append(f"{' '.join(command[:4])}: not finished after {limit_s:.0f} s")
    page.log += f"$ {' '.join(command)}\n{said}\n"
    page.text += [said, ""]


STAGES = {
    1: Stage("kernels", kernels),
    2: Stage("engine", engine),
    3: Stage("figures", figures),
    4: Stage("causes", causes),
    5: Stage("memory checks", memory_checks),
}

"""compute-sanitizer finds nothing in the kernels, and what is planted it finds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import sanitizer
from tests.gpu.planted import SOURCES
from tests.gpu.sanitizer import (
    FOUND_ERRORS,
    NODES,
    OFF,
    ROOT,
    TOOLS,
    VARIABLE,
    Outcome,
    find,
    require,
    run,
)

PYTEST = ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", TOOLS)
def test_a_planted_bug_is_found(compute_sanitizer, tool):
    """Else the next test would show nothing: some machines do not let the sanitizer work.  What
    memcheck finds ends the program, too, whose own status is returned then."""
    outcome = run(compute_sanitizer, tool, ["-m", "tests.gpu.planted", tool])
    assert outcome.returncode != 0, outcome.summary
    assert outcome.errors_found > 0, outcome.summary


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", TOOLS)
def test_the_kernels_are_clean(compute_sanitizer, tool):
    outcome = run(compute_sanitizer, tool, [*PYTEST, *NODES])
    assert (outcome.returncode, outcome.errors_found) == (0, 0), outcome.summary
    assert outcome.all_passed, outcome.summary


def test_the_selection_starts_every_source():
    listed = subprocess.run(
        [sys.executable, *PYTEST, "--collect-only", *NODES],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert listed.returncode == 0, listed.stdout[-2000:]
    found = {line.partition("[")[0] for line in listed.stdout.splitlines() if "::" in line}
    assert found == set(NODES)
    sources = {path.stem for path in (ROOT / "kernels" / "cuda").glob("*.cu")}
    assert {Path(name.partition("::")[0]).stem.removeprefix("test_") for name in NODES} == sources


def test_a_bug_is_planted_for_every_tool():
    assert set(TOOLS) < SOURCES.keys()


def program(folder, body):
    """An executable that is run in the place of compute-sanitizer."""
    path = folder / "compute-sanitizer"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_the_program_is_found_by_its_path_its_name_and_its_toolkit(tmp_path):
    path = str(program(tmp_path, "exit 0"))
    assert find({VARIABLE: path}) == path
    assert find({"PATH": str(tmp_path)}) == path
    (tmp_path / "bin").mkdir()
    inner = str(program(tmp_path / "bin", "exit 0"))
    assert find({"PATH": "/nowhere", "CUDA_PATH": str(tmp_path)}) == inner
    assert find({VARIABLE: OFF, "PATH": str(tmp_path)}) == OFF
    assert find({VARIABLE: "/nowhere/compute-sanitizer", "PATH": str(tmp_path)}) is None


def test_our_python_runs_inside_and_its_end_is_told(tmp_path):
    """What stands in the place of the program shows its options and runs the rest."""
    body = 'echo "given $*"; while [ "$1" != "%s" ]; do shift; done; "$@"; echo found; exit 86'
    path = program(tmp_path, body % sys.executable)
    code = "import os, tests; print(os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'])"
    outcome = run(str(path), "racecheck", ["-c", code])
    first, inner, last = outcome.output.splitlines()
    assert "--tool racecheck --error-exitcode 86" in first
    assert (inner, last) == ("1", "found")
    assert outcome == Outcome(FOUND_ERRORS, outcome.output)
    assert "returned 86" in outcome.summary


@pytest.mark.parametrize(
    ("said", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 12 errors", 12),
        ("1 passed\n========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)", 3),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0),
    ],
)
def test_what_the_program_counted_is_read(said, errors):
    assert Outcome(0, f"========= COMPUTE-SANITIZER\n{said}\n").errors_found == errors


@pytest.mark.parametrize(
    ("said", "passed"),
    [
        ("62 passed, 500 deselected in 9.1s\n========= ERROR SUMMARY: 0 errors", True),
        ("9 passed in 1s\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)", True),
        ("1 failed, 61 passed in 9.1s\n========= ERROR SUMMARY: 0 errors", False),
        ("60 passed, 2 skipped in 9.1s\n========= ERROR SUMMARY: 0 errors", False),
        ("1 passed, 1 error in 9.1s", False),
        ("500 deselected in 0.1s\n========= ERROR SUMMARY: 0 errors", False),
    ],
)
def test_tests_inside_have_passed_whatever_the_program_counts(said, passed):
    assert Outcome(0, f"========= COMPUTE-SANITIZER\n{said}\n").all_passed is passed


def test_a_program_that_has_not_counted_has_not_found_nothing():
    with pytest.raises(AssertionError, match="no summary"):
        _ = Outcome(0, "========= Error: Device not supported").errors_found


def test_a_run_without_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(sanitizer, "LONGEST_S", 0.5)
    path = program(tmp_path, "echo begun; exec sleep 60")
    outcome = run(str(path), "memcheck", ["-c", ""])
    assert outcome.returncode != 0
    assert "not finished after 0.5 s" in outcome.output


def test_a_missing_program_fails_and_says_what_to_do():
    with pytest.raises(pytest.fail.Exception, match="install the CUDA toolkit, name the program"):
        require({VARIABLE: "/nowhere/compute-sanitizer"})


def test_it_can_be_left_out():
    with pytest.raises(pytest.skip.Exception, match=f"{VARIABLE} leaves compute-sanitizer out"):
        require({VARIABLE: OFF})


def test_a_program_that_is_there_is_taken():
    assert require({VARIABLE: sys.executable}) == sys.executable

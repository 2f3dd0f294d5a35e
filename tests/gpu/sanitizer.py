"""NVIDIA's compute-sanitizer around a program of ours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck", "initcheck")
VARIABLE = "NIGHTJAR_COMPUTE_SANITIZER"
"""Names the program; OFF: these tests are left out."""
OFF = "none"

FOUND_ERRORS = 86
"""What the program returns where it found errors and the tests had none of their own."""

LONGEST_S = 540

TOOLKITS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")


@dataclass(frozen=True, slots=True)
class Outcome:
    """returncode: of the sanitizer; output: its own and the program's."""

    returncode: int
    output: str

    @property
    def errors_found(self) -> int:
        """What the sanitizer counted: errors, or with racecheck hazards.

        Raises:
            AssertionError: It says nothing of the kind: it did not work here.
        """
        found = re.search(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", self.output, re.MULTILINE)
        if found is None:
            raise AssertionError(f"no summary: {self.summary}")
        return int(found[1])

    @property
    def all_passed(self) -> bool:
        """Whether tests ran inside and passed, all of them.

        Of the sanitizer's own lines, which begin with =, none is read: they count errors as well.
        """
        said = [line for line in self.output.splitlines() if not line.startswith("=")]
        counts = re.findall(r"\b\d+ (passed|failed|errors?|skipped)", "\n".join(said))
        return set(counts) == {"passed"}

    @property
    def summary(self) -> str:
        """The end of the output, where the sanitizer counts what it found."""
        return f"compute-sanitizer returned {self.returncode}:\n{self.output[-6000:]}"


def find(environment: Mapping[str, str] = os.environ) -> str | None:
    """The program's path, OFF, or None where there is none."""
    named = environment.get(VARIABLE)
    if named == OFF:
        return OFF
    if named:
        return shutil.which(named)
    folders = [environment.get("PATH", os.defpath), *TOOLKITS]
    if toolkit := environment.get("CUDA_PATH") or environment.get("CUDA_HOME"):
        folders += [f"{toolkit}/bin", f"{toolkit}/compute-sanitizer"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def require(environment: Mapping[str, str] = os.environ) -> str:
    """The program's path; the test is skipped where it is left out, and fails where there is none:
    silence would be taken for a result."""
    found = find(environment)
    if found == OFF:
        pytest.skip(f"{VARIABLE} leaves compute-sanitizer out")
    if found is None:
        pytest.fail(
            "compute-sanitizer was not found: install the CUDA toolkit, name the program in "
            f"{VARIABLE}, or set {VARIABLE}={OFF} to leave these tests out",
            pytrace=False,
        )
    return found


def run(sanitizer: str, tool: str, python_arguments: Sequence[str]) -> Outcome:
    """Run our Python under one of the tools, from the repository's root.

    Every tensor gets an allocation of its own (torch keeps none), so that reading beside one, or
    reading what nobody wrote, is seen.  Errors that calls of CUDA's API return are left to the
    program: torch asks for some of them.
    """
    command = [
        sanitizer,
        *("--tool", tool),
        *("--error-exitcode", str(FOUND_ERRORS)),
        *("--report-api-errors", "no"),
        *("--print-limit", "20"),
        sys.executable,
        *python_arguments,
    ]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        said = late.output or b""
        text = said if isinstance(said, str) else said.decode(errors="replace")
        return Outcome(-1, f"{text}\nnot finished after {LONGEST_S} s")
    return Outcome(done.returncode, done.stdout)

"""The Python files of this repository."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = (
    "jobs/",
    "migrations/",
    "checkpoints/",
    "kernels/",
    "gpu_worker/",
    "pipeline/",
    "nightjar/",
)
"""The folders that a wheel holds."""


def python_files() -> list[str]:
    """Every Python file that git does not ignore, as a path below the root."""
    return subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()


def source_files() -> list[str]:
    """The Python files of the product."""
    return [name for name in python_files() if name.startswith(SOURCE)]

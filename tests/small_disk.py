"""A module of tests as a program with a small disk of its own, which nobody else sees."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

_OUTSIDE = ("unshare", "--user", "--map-root-user", "--mount")
_INSIDE = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
_MOUNT = 'mount -t tmpfs -o size="$0" tmpfs "$1" && shift && exec "$@"'


def command(
    module: str, disk: Path, size: int, *arguments: str | Path, ordinary_user: bool = False
) -> list[str]:
    """The command line that mounts a disk of `size` bytes at `disk`, and runs the module.

    ordinary_user: run it as one: PostgreSQL does not serve root.
    """
    program = [sys.executable, "-m", module, *map(str, arguments)]
    user: Sequence[str] = _INSIDE if ordinary_user else ()
    return [*_OUTSIDE, "sh", "-c", _MOUNT, str(size), str(disk), *user, *program]


def require_mounting() -> None:
    """Skip the test where nobody may mount a disk of his own; fail it in CI."""
    if subprocess.run([*_OUTSIDE, "true"], check=False).returncode:
        if os.environ.get("CI"):
            pytest.fail("this machine lets nobody mount a disk of his own")
        pytest.skip("this machine lets nobody mount a disk of his own")

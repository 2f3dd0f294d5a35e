"""The whole of `make test-browser` on a machine that has no browser and may not install one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("ci", "said", "status"), [("true", "1 error", 1), ("", "1 skipped", 0)])
def test_ci_fails_and_a_laptop_skips(tmp_path: Path, ci: str, said: str, status: int) -> None:
    """Nothing but Python is on the PATH: neither a browser nor apt."""
    (tmp_path / "python").symlink_to(sys.executable)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    kept.pop("NIGHTJAR_TEST_CHROMIUM", None)
    test = "tests/browser/test_every_page.py::test_a_fault_is_seen"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        cwd=ROOT,
        env=kept | {"PATH": str(tmp_path), "CI": ci},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stdout
    assert said in done.stdout
    assert "no Chromium or Chrome: install one" in done.stdout

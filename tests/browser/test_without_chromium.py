"""The whole of `make test-browser` on a machine that has no browser and may not install one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ci_fails(tmp_path: Path) -> None:
    """Nothing but Python is on the PATH: neither a browser nor apt."""
    (tmp_path / "python").symlink_to(sys.executable)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    kept.pop("NIGHTJAR_TEST_CHROMIUM", None)
    test = "tests/browser/test_every_page.py::test_a_fault_is_seen"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        cwd=ROOT,
        env=kept | {"PATH": str(tmp_path), "CI": "true"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "1 error" in done.stdout
    assert "no Chromium or Chrome: install one" in done.stdout

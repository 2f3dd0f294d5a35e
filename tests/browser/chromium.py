"""The Chromium that drives the tests: one that is there, else Debian's package where it may come.

`NIGHTJAR_TEST_CHROMIUM` names a browser's file. Without any browser the tests are skipped on a
laptop, and fail where the variable CI is set.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

VARIABLE = "NIGHTJAR_TEST_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAC_FILES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
# Fonts too: without them, Korean is drawn as empty boxes.
PACKAGES = ("chromium", "fonts-dejavu-core", "fonts-noto-cjk")
INSTALL_S = 300
# No other process of the machine may open it, and containers have little shared memory.
ARGUMENTS = ("--disable-dev-shm-usage", "--disable-gpu", "--force-color-profile=srgb")


def find_chromium() -> str | None:
    """The file of a browser on this machine; None without one."""
    if named := os.environ.get(VARIABLE):
        if not os.access(named, os.X_OK) or Path(named).is_dir():
            pytest.fail(f"{VARIABLE}={named} is no program that can be started", pytrace=False)
        return named
    found = (shutil.which(name) for name in NAMES)
    there = (path for path in MAC_FILES if Path(path).exists())
    return next((path for path in found if path), None) or next(there, None)


def install_chromium() -> str | None:
    """Install Debian's package, as root on a machine with apt; None where that cannot be."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return None
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (("update", "-qq"), ("install", "-qq", "--no-install-recommends", *PACKAGES)):
        try:
            subprocess.run(
                ["apt-get", "-y", *command],
                check=True,
                env=quiet,
                timeout=INSTALL_S,
                capture_output=True,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return None
    return find_chromium()


def needed_chromium() -> str:
    """The file of a browser; else the tests are skipped, or fail in CI."""
    with _one_process_at_a_time():
        found = find_chromium() or install_chromium()
    if found is not None:
        return found
    reason = (
        "no Chromium or Chrome: install one (on Debian `apt-get install chromium`), "
        f"or name its file in {VARIABLE}"
    )
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@contextmanager
def _one_process_at_a_time() -> Iterator[None]:
    """Several processes run the tests: one of them installs, and the others find what it did."""
    path = Path(tempfile.gettempdir(), f"nightjar-chromium-{os.geteuid()}.lock")
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def running_chromium(path: str) -> "Iterator[Browser]":
    """A browser without a window, until the block ends."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - an extra of these tests alone

    with sync_playwright() as playwright:
        # Chromium's own sandbox needs rights that root and containers do not have.
        browser = playwright.chromium.launch(
            executable_path=path, args=list(ARGUMENTS), chromium_sandbox=False
        )
        try:
            yield browser
        finally:
            browser.close()

"""How `make test-browser` comes to a Chromium: found, installed, skipped, or a failure of CI.

Each way is taken with programs of a PATH of its own; nothing is installed.
"""

import os
from pathlib import Path

import pytest

from tests.browser import chromium

INSTALLS = """#!/bin/sh
echo "$@" >> {folder}/apt.log
case "$*" in
*install*) printf '#!/bin/sh\\n' > {folder}/chromium; /bin/chmod +x {folder}/chromium ;;
esac
"""
FAILS = '#!/bin/sh\necho "$@" >> {folder}/apt.log\nexit 100\n'


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of the PATH, on a machine where we are root and no CI."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(chromium.VARIABLE, raising=False)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(chromium, "MAC_FILES", ())
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path


def program(folder: Path, name: str, text: str = "#!/bin/sh\n") -> Path:
    path = folder / name
    path.write_text(text.replace("{folder}", str(folder)), encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", chromium.NAMES)
def test_a_browser_that_is_there_is_taken(programs: Path, name: str) -> None:
    program(programs, "apt-get", FAILS)
    there = program(programs, name)
    assert chromium.needed_chromium() == str(there)
    assert not (programs / "apt.log").exists()


def test_a_named_browser_goes_before_one_that_is_found(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(programs, "chromium")
    own = program(programs, "own-browser")
    monkeypatch.setenv(chromium.VARIABLE, str(own))
    assert chromium.needed_chromium() == str(own)
    for wrong in (programs, programs / "none"):
        monkeypatch.setenv(chromium.VARIABLE, str(wrong))
        with pytest.raises(pytest.fail.Exception, match=f"{wrong} is no program"):
            chromium.needed_chromium()


def test_debians_package_is_installed_where_it_may_be(programs: Path) -> None:
    program(programs, "apt-get", INSTALLS)
    assert chromium.needed_chromium() == str(programs / "chromium")
    update, install = (programs / "apt.log").read_text(encoding="utf-8").splitlines()
    assert update == "-y update -qq"
    assert set(chromium.PACKAGES) < set(install.split())
    chromium.needed_chromium()  # it is there now
    assert len((programs / "apt.log").read_text(encoding="utf-8").splitlines()) == 2


@pytest.mark.parametrize("ci", [True, False])
@pytest.mark.parametrize("why", ["apt fails", "no apt", "no root"])
def test_without_a_browser_a_laptop_skips_and_ci_fails(
    programs: Path, monkeypatch: pytest.MonkeyPatch, why: str, ci: bool
) -> None:
    if why != "no apt":
        program(programs, "apt-get", FAILS if why == "apt fails" else INSTALLS)
    if why == "no root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if ci:
        monkeypatch.setenv("CI", "true")
    ends = pytest.fail.Exception if ci else pytest.skip.Exception
    with pytest.raises(ends, match=f"install one .*{chromium.VARIABLE}"):
        chromium.needed_chromium()
    assert (programs / "apt.log").exists() is (why == "apt fails")

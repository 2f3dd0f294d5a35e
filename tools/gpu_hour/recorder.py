"""A pytest plugin that writes each test's result to a file as soon as it is known.

What a process has written outlives its crash: `pytest -p tools.gpu_hour.recorder` with FILE in the
environment.  Tests whose result the file holds already are not run again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

FILE = "NIGHTJAR_TEST_RESULTS"
"""Environment variable: the file of results, one JSON object a line."""

LOST_DEVICE = ("CUDA error", "cudaError", "CUDA_ERROR", "an illegal memory access")
"""Words of errors after which a process cannot use its GPU any more."""

ERROR_LINES = 30


def read_results(path: Path) -> list[dict[str, Any]]:
    """Everything that was written; a last line that was cut off is left out."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


class Recorder:
    """Writes what begins and what ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done = {one["ended"] for one in read_results(path) if "ended" in one}
        self._now: dict[str, Any] = {}
        self._session: pytest.Session | None = None

    def _write(self, **fields: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported has no tests: its error is the result."""
        if report.failed:
            self._write(broken=report.nodeid, error=_tail(str(report.longrepr)))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out what an earlier process has done."""
        done = [item for item in items if item.nodeid in self._done]
        items[:] = [item for item in items if item.nodeid not in self._done]
        config.hook.pytest_deselected(items=done)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Tell how many there are."""
        self._session = session
        self._write(collected=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test that never ends has begun at least."""
        self._now = {"outcome": "passed", "seconds": 0.0}
        self._write(began=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, call and teardown of a test; its result is known after the last."""
        self._now["seconds"] += report.duration
        if report.failed or (report.skipped and self._now["outcome"] == "passed"):
            self._now |= {"outcome": report.outcome, "error": _tail(report.longreprtext)}
        if report.when != "teardown":
            return
        self._write(ended=report.nodeid, **self._now)
        lost = self._now["outcome"] == "failed" and any(
            words in self._now["error"] for words in LOST_DEVICE
        )
        if lost and self._session is not None:
            self._session.shouldstop = "the device is lost to this process"


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-ERROR_LINES:])


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder where a file is named."""
    if path := os.environ.get(FILE):
        config.pluginmanager.register(Recorder(Path(path)), "nightjar-recorder")

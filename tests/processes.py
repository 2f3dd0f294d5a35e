"""Starting the real command and looking at the real processes below it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from typer.testing import CliRunner

NIGHTJAR = [sys.executable, "-m", "nightjar"]
PATIENCE_S = 120.0


def nightjar(
    *arguments: str | Path, timeout_s: float = PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [*NIGHTJAR, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def nightjar_here(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in this process: one that ends before it starts any other."""
    from nightjar.pipeline.front.cli import app  # noqa: PLC0415 - a second, for few of the tests

    command = [str(argument) for argument in arguments]
    with patch.dict(os.environ):  # options become variables, for processes to come
        done = CliRunner().invoke(app, command)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(command, done.exit_code, done.stdout, done.stderr)


def start_nightjar(*arguments: str | Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the command; its output goes to `log`."""
    with log.open("wb") as stream:
        return subprocess.Popen(
            [*NIGHTJAR, *map(str, arguments)], stdout=stream, stderr=subprocess.STDOUT
        )


def wait_until(what: str, condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Poll until the condition holds; fail with what was waited for."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {patience_s:.0f} s in vain for {what}")
        time.sleep(0.05)


def find_children(pid: int, part: str) -> list[psutil.Process]:
    """Processes below `pid` whose command line holds `part`."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if any(part in word for word in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def all_ended(processes: list[psutil.Process]) -> bool:
    """Whether none of them runs any more; an unreaped process has ended."""
    return not any(_runs(process) for process in processes)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def write_lines(path: Path, lines: list[dict[str, Any] | str | bytes]) -> Path:
    """Write batch lines; text and bytes go as they are."""
    raw = [
        line
        if isinstance(line, bytes)
        else line.encode()
        if isinstance(line, str)
        else json.dumps(line, ensure_ascii=False).encode()
        for line in lines
    ]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def told(out: Path) -> dict[str, Any]:
    """What each answer of a run says, without what tells runs and origins apart."""
    found = {}
    for line in read_lines(out):
        body = line["response"]["body"]
        assert line["custom_id"] not in found
        answer = body["results"] if "results" in body else body["choices"]
        found[line["custom_id"]] = (answer, body["usage"])
    return found


def completion_line(custom_id: str, **body: Any) -> dict[str, Any]:
    """A batch line that asks for a completion; greedy unless said otherwise."""
    return _line(custom_id, "/v1/completions", {"max_tokens": 8, "temperature": 0} | body)


def rerank_line(custom_id: str, **body: Any) -> dict[str, Any]:
    """A batch line that asks for a ranking."""
    return _line(custom_id, "/v1/rerank", body)


def _line(custom_id: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}

"""Whether a worker's process is gone, asked of the kernel about real processes."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nightjar.pipeline.queue import liveness
from nightjar.pipeline.queue.liveness import is_gone, owner_name, process_table
from tests.processes import wait_until

SAY_NAME = (
    "import sys, time; from nightjar.pipeline.queue.liveness import owner_name; "
    "print(owner_name(), flush=True); time.sleep(600)"
)


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that sleeps, and its name."""
    process = subprocess.Popen([sys.executable, "-c", SAY_NAME], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        yield process, process.stdout.readline().strip()
    process.kill()
    process.wait()


@pytest.fixture
def ended(other: tuple[subprocess.Popen[str], str]) -> tuple[int, str]:
    """The id of a process that was killed and reaped, and its name."""
    process, name = other
    process.kill()
    process.wait()
    return process.pid, name


def test_no_two_names_are_alike() -> None:
    assert owner_name() != owner_name()
    assert f":{os.getpid()}:" in owner_name()


def test_a_process_is_gone_once_it_is_killed(other: tuple[subprocess.Popen[str], str]) -> None:
    process, name = other
    assert not is_gone(owner_name())
    assert not is_gone(name)
    process.send_signal(signal.SIGSTOP)  # a heartbeat that stands still is the clock's to judge
    assert not is_gone(name)
    process.kill()
    wait_until("the end, seen before anybody reaps it", lambda: is_gone(name))
    process.wait()
    assert is_gone(name)


def test_another_process_of_the_same_id_is_not_taken_for_it() -> None:
    *parts, began = owner_name().split(":")
    assert is_gone(":".join([*parts, str(int(began) - 1)]))


@pytest.mark.parametrize("table", ["", "0123456789ab"], ids=["unknown", "another machine's"])
def test_nothing_is_certain_of_a_process_of_elsewhere(table: str, ended: tuple[int, str]) -> None:
    _, name = ended
    host, pid, random, _, began = name.split(":")
    assert not is_gone(f"{host}:{pid}:{random}:{table}:{began}")


@pytest.mark.parametrize("name", ["host:99999999:8e4f5a00", "silent", "", "a:b:c:d:e:f"])
def test_nothing_is_certain_of_a_name_of_another_version(name: str) -> None:
    assert not is_gone(name)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Another machine's memory, empty."""
    process_table.cache_clear()
    monkeypatch.setattr(liveness, "_MEMORY", tmp_path)
    yield tmp_path
    process_table.cache_clear()


def test_a_clone_of_the_machine_is_another_one(ended: tuple[int, str], memory: Path) -> None:
    """It shares boot id, namespace number and host name; only its memory is its own."""
    pid, name = ended
    assert not is_gone(name)
    assert is_gone(owner_name().replace(f":{os.getpid()}:", f":{pid}:"))


def test_a_host_of_another_name_is_another_one(
    ended: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, name = ended
    process_table.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "clone")
        assert not is_gone(name)
        process_table.cache_clear()
    assert is_gone(name)


def test_the_identity_is_made_once_and_for_every_user(memory: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        # Without its cache, as that many processes that start at once.
        asked = [pool.submit(process_table.__wrapped__) for _ in range(32)]
        (table,) = {future.result() for future in asked}
    assert table
    assert [path.name for path in memory.iterdir()] == ["nightjar-machine"]
    assert (memory / "nightjar-machine").stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize("content", ["", "somebody's file"])
def test_without_an_identity_nothing_is_certain(memory: Path, content: str) -> None:
    (memory / "nightjar-machine").write_text(content)
    assert process_table() == ""


def test_without_memory_of_its_own_nothing_is_certain(memory: Path) -> None:
    memory.rmdir()
    assert process_table() == ""
    memory.mkdir()


def test_without_proc_nothing_is_certain(
    ended: tuple[int, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, name = ended
    process_table.cache_clear()
    monkeypatch.setattr(liveness, "_PROC", tmp_path)
    try:
        assert not is_gone(name)
        assert owner_name().endswith("::")
    finally:
        process_table.cache_clear()


def test_a_living_process_of_another_user_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", forbidden)
    assert not is_gone(owner_name())


def test_the_name_holds_when_the_process_began(other: tuple[subprocess.Popen[str], str]) -> None:
    own, later = (int(name.rpartition(":")[2]) for name in (owner_name(), other[1]))
    assert 0 < own < later

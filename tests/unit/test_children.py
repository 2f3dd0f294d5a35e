"""Children that live and die with their parent, and how often they are started again."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from nightjar.children import (
    ClosedError,
    RestartPolicy,
    Supervisor,
    how_ended,
    last_words,
    start_child,
    wait_or_kill,
)
from tests.processes import all_ended, wait_until

SLEEPS = [sys.executable, "-c", "import time; time.sleep(100)"]
DEAF = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(100)",
]


def numbered(policy: RestartPolicy) -> Supervisor[int]:
    """Its children are the numbers 1, 2, 3."""
    numbers = iter(range(1, 100))
    return Supervisor(lambda: next(numbers), policy)


def test_a_child_is_given_up_at_the_last_failure_and_not_before() -> None:
    supervisor = numbered(RestartPolicy(most_failures=3))
    assert [supervisor.failed() for _ in range(3)] == [False, False, True]
    assert supervisor.failures == 3


def test_a_success_makes_the_count_start_anew() -> None:
    supervisor = numbered(RestartPolicy(most_failures=3))
    assert [supervisor.failed() for _ in range(2)] == [False, False]
    supervisor.succeeded()
    assert supervisor.failures == 0
    assert [supervisor.failed() for _ in range(3)] == [False, False, True]


def test_without_a_limit_no_child_is_given_up() -> None:
    supervisor = numbered(RestartPolicy())
    assert not any(supervisor.failed() for _ in range(1000))


def test_a_long_life_is_no_failure() -> None:
    supervisor = numbered(RestartPolicy(most_failures=2, stable_after_s=0.05))
    assert supervisor.start() == 1
    assert not supervisor.failed()
    time.sleep(0.06)
    assert supervisor.age_s >= 0.05
    assert not supervisor.failed()
    assert supervisor.failures == 0
    assert supervisor.start() == 2
    assert [supervisor.failed(), supervisor.failed()] == [False, True]


def test_a_closed_supervisor_starts_nothing_and_waits_for_nothing() -> None:
    supervisor = numbered(RestartPolicy(pause_s=100))
    assert supervisor.child is None
    supervisor.start()
    waiting = threading.Thread(target=supervisor.pause)
    waiting.start()
    assert (supervisor.close(), supervisor.closed) == (1, True)
    waiting.join(10)
    assert not waiting.is_alive()
    with pytest.raises(ClosedError):
        supervisor.start()
    assert supervisor.child == 1


def test_a_pause_lasts_as_long_as_the_policy_says() -> None:
    began = time.monotonic()
    numbered(RestartPolicy(pause_s=0.1)).pause()
    assert 0.1 <= time.monotonic() - began < 5


def test_a_start_that_fails_leaves_the_last_child_and_may_be_tried_again(tmp_path: Path) -> None:
    program = tmp_path / "program"
    supervisor = Supervisor(lambda: start_child([str(program)]), RestartPolicy())
    with pytest.raises(FileNotFoundError):
        supervisor.start()
    assert supervisor.child is None
    program.write_text("#!/bin/sh\nexit 4\n")
    program.chmod(0o755)
    assert how_ended(supervisor.start().wait(30)) == "ended with status 4"


def test_the_log_holds_the_output_of_all_lives_and_its_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for text in ("first", "x" * 3000, "last"):
        code = f"import os, sys; print({text!r}); os.write(2, os.getcwd().encode())"
        child = start_child([sys.executable, "-c", code], log=log, directory=tmp_path)
        assert child.wait(30) == 0
    assert log.read_text().startswith("first\n")
    words = last_words(log)
    assert len(words) == 2000
    assert words.endswith(f"xxx\n{tmp_path}last\n{tmp_path}")


def test_a_log_shorter_than_the_last_words_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"all \xff")
    assert last_words(tmp_path / "log") == "all \ufffd"


def test_environment_session_and_descriptors_are_the_childs_own() -> None:
    reading, writing = os.pipe()
    code = f"import os; os.write({writing}, f'{{os.getsid(0)}} {{os.environ.get(\"A\")}}'.encode())"
    for own_session, variables in ((True, {"A": "b"}), (False, {})):
        child = start_child(
            [sys.executable, "-c", code],
            environment=variables,
            descriptors=[writing],
            own_session=own_session,
        )
        assert child.wait(30) == 0
        session = child.pid if own_session else os.getsid(0)
        assert os.read(reading, 100).decode() == f"{session} {variables.get('A')}"
    os.close(reading)
    os.close(writing)


def test_a_child_that_ignores_term_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = start_child(DEAF, log=log)
    wait_until("the child", log.read_text)
    child.terminate()
    assert how_ended(wait_or_kill(child, 0.1)) == "was ended by SIGKILL"


def test_a_child_that_ends_in_time_is_not_killed() -> None:
    child = start_child(SLEEPS)
    child.terminate()
    assert how_ended(wait_or_kill(child, 30)) == "was ended by SIGTERM"


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert how_ended(-250) == "was ended by signal 250"
    assert how_ended(0) == "ended with status 0"


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_children_die_with_a_parent_that_is_killed() -> None:
    """One is tied by its parent, one ties itself."""
    parent_code = """
import sys
from nightjar.children import start_child
sleeps = [sys.executable, "-c", "import time; time.sleep(100)"]
ties_itself = (
    "import sys, time; from nightjar.children import die_with_parent; "
    "die_with_parent(int(sys.argv[1])); print('tied', flush=True); time.sleep(100)"
)
import os
first = start_child(sleeps, dies_with_thread=True)
second = start_child([sys.executable, "-c", ties_itself, str(os.getpid())])
print(first.pid, second.pid, flush=True)
second.wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        said = [parent.stdout.readline() for _ in range(2)]
        pids = next(line for line in said if line != "tied\n").split()
        children = [psutil.Process(int(pid)) for pid in pids]
        assert not all_ended(children[:1])
        assert not all_ended(children[1:])
        parent.kill()
    wait_until("the end of the children", lambda: all_ended(children))


def test_a_child_whose_parent_is_gone_ends_at_once() -> None:
    code = "from nightjar.children import die_with_parent; die_with_parent(1 << 30); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")

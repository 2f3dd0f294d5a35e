"""The systems of the comparison, and how their runners are started, asked and put to rest."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from nightjar.children import how_ended, last_words

from .harness import CACHE, ROOT
from .peers.protocol import Answer, Message, Workload

START_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 900.0
VENVS = CACHE / "venvs"
"""Each peer has an environment of its own here, which `make bench-peers` makes."""


class SystemFailedError(Exception):
    """A system could not do what it was asked; the message is the reason that is reported."""


def failure_of(name: str) -> str | None:
    """Why a peer has no environment, or None when it has one."""
    said = VENVS / f"{name}.failed"
    if (VENVS / f"{name}.made").is_file():
        return None
    if not said.is_file():
        return "not installed: make bench-peers"
    return f"installation failed: {_last_line(said)}"


def _last_line(log: Path) -> str:
    return last_words(log).strip().rpartition("\n")[2][:300]


@dataclass(frozen=True)
class SystemSpec:
    """One system: its runner is peers/NAME_peer.py; the precisions it is asked for.

    environment: variables its makers recommend; every system also gets OMP_NUM_THREADS.  The
    OpenMP wait policy is each library's own default unless it is named here.
    """

    name: str
    precisions: tuple[str, ...]
    ours: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def command(self) -> tuple[list[str], Path]:
        """The runner's command line, and the directory it starts in.

        Peers start in this folder: in the root, the names of our rooms would hide theirs
        (`kernels` is also a package that transformers looks for).
        """
        module = f"peers.{self.name}_peer"
        if self.ours:
            return [sys.executable, "-m", f"benchmarks.{module}"], ROOT
        if (reason := failure_of(self.name)) is not None:
            raise SystemFailedError(reason)
        return [str(VENVS / self.name / "bin" / "python"), "-m", module], ROOT / "benchmarks"


# As our launcher starts the compute process.
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
NIGHTJAR = SystemSpec("nightjar", ("fp32", "bf16", "int8"), ours=True, environment=_PASSIVE)
TRANSFORMERS = SystemSpec("transformers", ("fp32", "bf16"))
SYSTEMS = {
    spec.name: spec
    for spec in (
        NIGHTJAR,
        TRANSFORMERS,
        SystemSpec("ctranslate2", ("fp32", "int8")),
        SystemSpec("vllm", ("fp32", "bf16")),
        SystemSpec("llamacpp", ("fp32", "bf16", "int8")),
        SystemSpec("openvino", ("fp32", "int8")),
    )
}


class Runner:
    """A runner process.  It computes only while it is asked: between messages its process group
    is stopped, so that nothing of an idle system takes time from the one that is measured."""

    def __init__(self, spec: SystemSpec, precision: str, threads: int, log: Path) -> None:
        self.precision, self._threads, self._log = precision, threads, log
        command, directory = spec.command()
        environment = os.environ | spec.environment
        environment["PYTHONPATH"] = str(ROOT) if spec.ours else ""
        environment |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                cwd=directory,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )

    def load(self, model: Path) -> Answer:
        """Load the model; what the system converts it to is kept."""
        converted = CACHE / "converted" / model.name
        where = str(model.resolve()), self.precision, self._threads, str(converted.resolve())
        return self._ask(Message(None, *where), START_TIMEOUT_S)

    def run(self, workload: Workload) -> Answer:
        """Run a workload."""
        return self._ask(Message(workload), RUN_TIMEOUT_S)

    def close(self) -> None:
        """End the process and its children."""
        self._signal(signal.SIGKILL)
        with suppress(BrokenPipeError):  # what was asked of a dead process is still to go
            self.process.communicate()

    def _ask(self, message: Message, timeout_s: float) -> Answer:
        source, answers = self.process.stdin, self.process.stdout
        assert source is not None
        assert answers is not None
        watchdog = threading.Timer(timeout_s, self._signal, (signal.SIGKILL,))
        self._signal(signal.SIGCONT)
        watchdog.start()
        line = b""
        with suppress(BrokenPipeError):
            source.write(msgspec.json.encode(message) + b"\n")
            source.flush()
            line = answers.readline()
        late = watchdog.finished.is_set()
        watchdog.cancel()
        if late:
            raise SystemFailedError(f"no answer in {timeout_s:.0f} s")
        if not line:  # SIGKILL is what the system sends where memory runs out
            ended = how_ended(self.process.wait())
            raise SystemFailedError(f"the runner {ended}: {_last_line(self._log)}")
        self._signal(signal.SIGSTOP)
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error is not None:
            raise SystemFailedError(answer.error)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

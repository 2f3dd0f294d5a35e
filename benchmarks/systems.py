"""The systems of the comparison, and how their runners are started, asked and put to rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .environments import environment_python, failure_of
from .peers.protocol import Workload
from .writing import ROOT

START_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 900.0


class SystemFailedError(Exception):
    """A system could not do what it was asked; the message is the reason that is reported."""


@dataclass(frozen=True)
class SystemSpec:
    """One system: its runner file, its environment, the precisions it is asked for.

    environment: variables its makers recommend; every system also gets OMP_NUM_THREADS.  The
    OpenMP wait policy is each library's own default unless it is named here.
    """

    name: str
    module: str
    precisions: tuple[str, ...]
    ours: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def command(self) -> tuple[list[str], Path]:
        """The runner's command line, and the directory it starts in.

        Peers start in this folder: in the root, the names of our rooms would hide theirs
        (`kernels` is also a package that transformers looks for).
        """
        if self.ours:
            return [sys.executable, "-m", f"benchmarks.peers.{self.module}"], ROOT
        if (reason := failure_of(self.name)) is not None:
            raise SystemFailedError(reason)
        python = environment_python(self.name)
        return [str(python), "-m", f"peers.{self.module}"], ROOT / "benchmarks"


NIGHTJAR = SystemSpec(
    "nightjar",
    "nightjar_engine",
    ("fp32", "bf16", "int8"),
    ours=True,
    environment={"OMP_WAIT_POLICY": "PASSIVE"},  # as our launcher starts the compute process
)
NIGHTJAR_RUN = SystemSpec("nightjar-run", "nightjar_run", ("fp32",), ours=True)
TRANSFORMERS = SystemSpec("transformers", "transformers_peer", ("fp32", "bf16"))
SYSTEMS = {
    spec.name: spec
    for spec in (
        NIGHTJAR,
        NIGHTJAR_RUN,
        TRANSFORMERS,
        SystemSpec("ctranslate2", "ctranslate2_peer", ("fp32", "int8")),
        SystemSpec("vllm", "vllm_peer", ("fp32", "bf16")),
        SystemSpec("llamacpp", "llamacpp_peer", ("fp32", "bf16", "int8")),
        SystemSpec("openvino", "openvino_peer", ("fp32", "int8")),
    )
}


class Runner:
    """A runner process.  It computes only while it is asked: between messages its process group
    is stopped, so that nothing of an idle system takes time from the one that is measured."""

    def __init__(self, spec: SystemSpec, precision: str, threads: int, log: Path) -> None:
        self.spec, self.precision, self._threads = spec, precision, threads
        command, directory = spec.command()
        environment = os.environ | spec.environment
        environment |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        environment.pop("PYTHONPATH", None)
        if spec.ours:
            environment["PYTHONPATH"] = str(ROOT)
        self._log = log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._log_path = log

    @property
    def pid(self) -> int:
        """The process id of the runner."""
        return self._process.pid

    def load(self, model: Path, converted: Path) -> dict[str, Any]:
        """Load the model; the answer holds load_s, versions, settings and start_mib."""
        message = {
            "command": "load",
            "model": str(model.resolve()),
            "precision": self.precision,
            "threads": self._threads,
            "converted": str(converted.resolve()),
        }
        return self._ask(message, START_TIMEOUT_S)

    def run(self, workload: Workload) -> dict[str, Any]:
        """Run a workload; the answer holds seconds, outcome and peak_mib."""
        return self._ask({"command": "run", "workload": workload.to_json()}, RUN_TIMEOUT_S)

    def close(self) -> None:
        """End the process and its children."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # what was asked of a dead process is still to go
                    stream.close()
        self._log.close()

    def _ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        source, answers = self._process.stdin, self._process.stdout
        assert source is not None
        assert answers is not None
        watchdog = threading.Timer(timeout_s, self._signal, (signal.SIGKILL,))
        self._signal(signal.SIGCONT)
        watchdog.start()
        try:
            source.write(json.dumps(message) + "\n")
            source.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late = watchdog.finished.is_set()
            watchdog.cancel()
        if not line:
            raise SystemFailedError(
                f"no answer in {timeout_s:.0f} s" if late else self._last_words()
            )
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if not answer.pop("ok"):
            raise SystemFailedError(answer["error"])
        return answer

    def _last_words(self) -> str:
        status = self._process.wait()
        if status == -signal.SIGKILL:
            return "the runner was killed, as the system does where memory runs out"
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = f": {lines[-1][:300]}" if lines else ""
        return f"the runner ended with {status}{said}"

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

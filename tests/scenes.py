"""Runs the shell blocks of a scene of `tests/documented.py` as they are written.

Only what a reader replaces too is replaced: names in capitals, ids, addresses. A text that is to be
replaced and is not in the block is an error, as the document has changed then.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.documented import SCENES, shell_blocks
from tests.documents import ROOT

PROGRAMS = Path(sys.executable).parent
Replaced = Mapping[str, str]


@dataclass
class Scene:
    """The blocks of a scene, a folder in which they run, and their variables.

    left: The first lines of the blocks that were not run yet.
    """

    folder: Path
    variables: dict[str, str]
    blocks: dict[str, str]
    left: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.left = set(self.blocks)
        # `source .venv/bin/activate` and `.venv/bin/nightjar` mean the environment of the tests.
        bin_ = self.folder / ".venv" / "bin"
        bin_.mkdir(parents=True, exist_ok=True)
        (bin_ / "activate").write_text(f'PATH="{PROGRAMS}:$PATH"\n', encoding="utf-8")

    def text(self, first: str, replaced: Replaced | None = None) -> str:
        """Take the block whose first line is this, or else begins like this; with replacements."""
        (key,) = [one for one in self.blocks if one == first] or [
            one for one in self.blocks if one.startswith(first)
        ]
        self.left.discard(key)
        text = self.blocks[key]
        for old, new in (replaced or {}).items():
            assert old in text, (old, text)
            text = text.replace(old, new)
        return text

    def run(self, first: str, replaced: Replaced | None = None, more: str = "") -> str:
        """Run a block, and `more` behind it; returns what it wrote to standard output."""
        return self.shell(self.text(first, replaced) + more)

    def shell(self, text: str) -> str:
        """Run commands until one fails, which is an AssertionError."""
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", text],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout[-2_000:]}\n{done.stderr[-4_000:]}"
        return done.stdout

    @contextmanager
    def started(self, text: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run commands that start processes, which end with the block."""
        with (self.folder / "started.log").open("wb") as log:
            shell = subprocess.Popen(
                ["bash", "-e", "-c", f"{text}\nwait\n"],
                cwd=self.folder,
                env=self.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield shell
        except BaseException:
            sys.stderr.write((self.folder / "started.log").read_text(errors="replace")[-6_000:])
            raise
        finally:
            family = psutil.Process(shell.pid).children(recursive=True)
            for one in family:
                one.send_signal(signal.SIGTERM)
            _, alive = psutil.wait_procs(family, timeout=20)
            for one in alive:
                one.kill()
            shell.kill()
            shell.wait()

    def environment(self) -> dict[str, str]:
        """Variables of this machine without Nightjar's, and those of the scene."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("NIGHTJAR_", "OTEL_"))}
        if cache := os.environ.get("NIGHTJAR_KERNEL_CACHE"):
            kept["NIGHTJAR_KERNEL_CACHE"] = cache
        path = os.pathsep.join([str(PROGRAMS), kept.get("PATH", "")])
        here = {"PATH": path, "HOME": str(self.folder), "PYTHONPATH": str(ROOT)}
        return kept | here | self.variables


@contextmanager
def playing(name: str, folder: Path, variables: Mapping[str, str]) -> Iterator[Scene]:
    """A scene; when the block ends, AssertionError if a block of the document was not run."""
    blocks = {key[1]: shell_blocks()[key] for key in SCENES[name]}
    scene = Scene(folder, dict(variables), blocks)
    yield scene
    assert not scene.left, f"no test ran {scene.left}"


def copy_examples(folder: Path) -> None:
    """The folder `examples` as a fresh checkout has it."""
    made = shutil.ignore_patterns("data", "*.work", "answers.db*", "__pycache__")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=made)

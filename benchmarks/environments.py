"""Virtual environments of the peers: `python -m benchmarks.environments [NAME ...]`.

Each peer has one of its own, made from `peers/requirements-NAME.txt`.  An environment that cannot
be made does not stop the others: the reason is kept, and the comparison reports it.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .harness import ROOT, write_whole

CACHE = ROOT / "benchmarks" / ".cache"
REQUIREMENTS = ROOT / "benchmarks" / "peers"
FAILED = "installation failed: "

# Packages ask for builds of these that do not load beside a CPU torch, and run without them.
UNWANTED = {"vllm": ("torchvision", "torchaudio", "torchcodec"), "openvino": ("torchvision",)}
# llama.cpp is compiled: without its examples, and for the instructions of this machine (its
# default).
BUILD_OPTIONS = {"llamacpp": {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}}


def environment_python(name: str) -> Path:
    """The interpreter of a peer's environment."""
    return CACHE / "venvs" / name / "bin" / "python"


def _note(name: str) -> Path:
    """Holds the requirements that a whole environment was made from, or why it was not made."""
    return CACHE / "venvs" / f"{name}.txt"


def failure_of(name: str) -> str | None:
    """Why a peer has no environment, or None when it has one."""
    if not _note(name).is_file():
        return f"not installed: python -m benchmarks.environments {name}"
    said = _note(name).read_text(encoding="utf-8")
    return said if said.startswith(FAILED) else None


def make_environment(name: str) -> str | None:
    """Make a peer's environment unless it is there already; returns why that failed, or None."""
    requirements = REQUIREMENTS / f"requirements-{name}.txt"
    wanted, note = requirements.read_text(encoding="utf-8"), _note(name)
    if note.is_file() and note.read_text(encoding="utf-8") == wanted:
        return None
    python = environment_python(name)
    shutil.rmtree(python.parents[1], ignore_errors=True)
    note.unlink(missing_ok=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    commands = [
        [sys.executable, "-m", "venv", str(python.parents[1])],
        [*pip, "install", "--quiet", "-r", str(requirements)],
    ]
    if name in UNWANTED:
        commands.append([*pip, "uninstall", "--quiet", "--yes", *UNWANTED[name]])
    environment = os.environ | BUILD_OPTIONS.get(name, {})
    try:
        for command in commands:
            subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()[-1:] or [str(error.returncode)]
        wanted = f"{FAILED}{said[0]}"
    write_whole(note, wanted)
    return failure_of(name)


def peer_names() -> list[str]:
    """Every peer that has a requirements file."""
    prefix = "requirements-"
    return sorted(file.stem.removeprefix(prefix) for file in REQUIREMENTS.glob(f"{prefix}*.txt"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(peer_names()))
    for name in parser.parse_args().names or peer_names():
        print(f"{name}: {make_environment(name) or 'ready'}", flush=True)


if __name__ == "__main__":
    main()

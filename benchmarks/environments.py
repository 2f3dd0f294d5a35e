"""Virtual environments of the peers: `python -m benchmarks.environments [NAME ...]`.

Each peer has one of its own, made from `peers/requirements-NAME.txt`.  An environment that cannot
be made does not stop the others: the reason is kept, and the comparison reports it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .writing import ROOT

CACHE = ROOT / "benchmarks" / ".cache"
REQUIREMENTS = ROOT / "benchmarks" / "peers"

# Packages ask for builds of these that do not load beside a CPU torch, and run without them.
UNWANTED = {"vllm": ("torchvision", "torchaudio", "torchcodec"), "openvino": ("torchvision",)}

# llama.cpp is compiled: without its examples, and for the instructions of this machine (its
# default).
BUILD_OPTIONS = {"llamacpp": {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}}


def environment_python(name: str) -> Path:
    """The interpreter of a peer's environment."""
    return CACHE / "venvs" / name / "bin" / "python"


def requirements_file(name: str) -> Path:
    return REQUIREMENTS / f"requirements-{name}.txt"


def _marker(name: str) -> Path:
    """Written last, holds the requirements the environment was made from."""
    return CACHE / "venvs" / name / "installed.txt"


def _reason_file(name: str) -> Path:
    return CACHE / "venvs" / f"{name}.failed.txt"


def failure_of(name: str) -> str | None:
    """Why a peer has no environment, or None when it has one."""
    if environment_python(name).is_file() and _marker(name).is_file():
        return None
    if _reason_file(name).is_file():
        return _reason_file(name).read_text(encoding="utf-8")
    return f"not installed: python -m benchmarks.environments {name}"


def make_environment(name: str) -> str | None:
    """Make a peer's environment unless it is there already; returns why that failed, or None."""
    wanted = requirements_file(name).read_text(encoding="utf-8")
    marker = _marker(name)
    if marker.is_file() and marker.read_text(encoding="utf-8") == wanted:
        return None
    directory = environment_python(name).parents[1]
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    _reason_file(name).unlink(missing_ok=True)
    pip = [str(environment_python(name)), "-m", "pip", "--disable-pip-version-check"]
    commands = [
        [sys.executable, "-m", "venv", str(directory)],
        [*pip, "install", "--quiet", "-r", str(requirements_file(name))],
    ]
    if name in UNWANTED:
        commands.append([*pip, "uninstall", "--quiet", "--yes", *UNWANTED[name]])
    for command in commands:
        options = os.environ | BUILD_OPTIONS.get(name, {})
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=options)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            reason = f"installation failed: {lines[-1] if lines else done.returncode}"
            _reason_file(name).write_text(reason, encoding="utf-8")
            return reason
    marker.write_text(wanted, encoding="utf-8")
    return None


def peer_names() -> list[str]:
    """Every peer that has a requirements file."""
    prefix = "requirements-"
    return sorted(file.stem.removeprefix(prefix) for file in REQUIREMENTS.glob(f"{prefix}*.txt"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(peer_names()))
    for name in parser.parse_args().names or peer_names():
        print(f"{name}: {make_environment(name) or 'ready'}", flush=True)


if __name__ == "__main__":
    main()

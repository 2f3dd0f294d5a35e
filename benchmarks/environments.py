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


def _kept(name: str, ending: str) -> Path:
    """`installed` holds the requirements that the environment was made from, `failed` the reason
    why it could not be made; there is one of them."""
    return CACHE / "venvs" / f"{name}.{ending}.txt"


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def failure_of(name: str) -> str | None:
    """Why a peer has no environment, or None when it has one."""
    if _kept(name, "installed").is_file():
        return None
    return (
        _read(_kept(name, "failed")) or f"not installed: python -m benchmarks.environments {name}"
    )


def make_environment(name: str) -> str | None:
    """Make a peer's environment unless it is there already; returns why that failed, or None."""
    requirements = REQUIREMENTS / f"requirements-{name}.txt"
    wanted = requirements.read_text(encoding="utf-8")
    if _read(_kept(name, "installed")) == wanted:
        return None
    directory = environment_python(name).parents[1]
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    for ending in ("installed", "failed"):
        _kept(name, ending).unlink(missing_ok=True)
    pip = [str(environment_python(name)), "-m", "pip", "--disable-pip-version-check"]
    commands = [
        [sys.executable, "-m", "venv", str(directory)],
        [*pip, "install", "--quiet", "-r", str(requirements)],
    ]
    if name in UNWANTED:
        commands.append([*pip, "uninstall", "--quiet", "--yes", *UNWANTED[name]])
    for command in commands:
        options = os.environ | BUILD_OPTIONS.get(name, {})
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=options)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            reason = f"installation failed: {lines[-1] if lines else done.returncode}"
            _kept(name, "failed").write_text(reason, encoding="utf-8")
            return reason
    _kept(name, "installed").write_text(wanted, encoding="utf-8")
    return None


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

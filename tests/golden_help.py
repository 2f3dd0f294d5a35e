"""The help of every command, as files of tests/golden/help.

`python -m tests.golden_help` writes them again, after a command was changed on purpose.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import typer
from typer.testing import CliRunner

from nightjar.pipeline.front.cli import app

FOLDER = Path(__file__).parent / "golden" / "help"
_ROOT = Path(__file__).parents[1]
_WIDTH = "100"


def command_paths() -> list[tuple[str, ...]]:
    """Every command as the words after `nightjar`; the empty one is `nightjar` itself."""
    paths: list[tuple[str, ...]] = [()]

    def add(group: object, before: tuple[str, ...]) -> None:
        for name, command in sorted(getattr(group, "commands", {}).items()):
            paths.append((*before, name))
            add(command, (*before, name))

    add(typer.main.get_command(app), ())
    return paths


def help_texts() -> dict[str, str]:
    """The help of each command by its file's name.

    In a process of its own: what the caller's terminal is and which variables are set shows in it.
    """
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment |= {"TERMINAL_WIDTH": _WIDTH, "COLUMNS": _WIDTH, "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden_help", "--print"],
        cwd=_ROOT,
        env=environment | {"PYTHONPATH": str(_ROOT)},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def write() -> None:
    """Write the files anew, and remove those of commands that are gone."""
    texts = help_texts()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("*.txt"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def _ask_all() -> dict[str, str]:
    texts = {}
    for path in command_paths():
        done = CliRunner().invoke(app, [*path, "--help"], prog_name="nightjar")
        assert done.exit_code == 0, done.output
        lines = [line.rstrip() for line in done.stdout.splitlines()]
        texts["-".join(("nightjar", *path)) + ".txt"] = "\n".join(lines).strip("\n") + "\n"
    return texts


if __name__ == "__main__":
    if "--print" in sys.argv:
        sys.stdout.write(json.dumps(_ask_all()))
    else:
        write()

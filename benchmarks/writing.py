"""What every benchmark takes and writes: its arguments, its result file, tables of Markdown."""

import json
import shlex
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Figures = dict[str, Any]


def begun(module: str, given: Sequence[str] | None = None) -> Figures:
    """The head of a result: its date, and the command with the arguments that were given."""
    command = ["python", "-m", module, *(sys.argv[1:] if given is None else given)]
    return {"date": datetime.now(UTC).date().isoformat(), "command": shlex.join(command)}


def commit() -> str:
    """The commit, and whether the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return done.stdout.strip()


def parser(module: str, doc: str | None) -> ArgumentParser:
    """The parser of a benchmark's arguments, described by its docstring's first line."""
    found = ArgumentParser(f"python -m {module}", description=(doc or "").partition("\n")[0])
    found.add_argument("--out", type=Path, help="the result's file")
    return found


def words(known: Collection[str]) -> Callable[[str], list[str]]:
    """For argparse: words with commas between them; unknown ones are refused."""

    def parse(text: str) -> list[str]:
        found = [word for word in text.split(",") if word]
        if unknown := sorted(set(found) - set(known)):
            raise ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return found

    return parse


def write_whole(path: Path, text: str) -> None:
    """The file holds its old text or the new one, whole, whenever this process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def write_json(path: Path, content: Figures) -> None:
    """One result."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

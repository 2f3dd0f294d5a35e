"""What every benchmark shares: its arguments, turns and times, its result, tables of Markdown."""

import json
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from .machine import describe

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CACHE = ROOT / "benchmarks" / ".cache"
DEMO_MODEL = ROOT / "examples" / "demo_model"
DATABASES = ("sqlite", "postgresql")

Figures = dict[str, Any]
Option = tuple[Any, ...]
"""An option's default, or the type of one that must be given; what it is; what it may be."""
DATA: Mapping[str, Option] = {
    "--data": (Path, "a folder with the tables that examples/demo_model/README.md names")
}
Key = TypeVar("Key")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Benchmark:
    """A command `python -m benchmarks.NAME` that writes `results/NAME-DATE.json`.

    Args:
        measure: Given the arguments and an empty folder, returns figures.
        ways: What is measured one after another, `args.way`, each into a part of the result that
            has its name; without ways, the figures are the result.
        about: What the result says beside the machine.
        stem: The beginning of the result's name, where it is not the benchmark's.
    """

    name: str
    doc: str | None
    measure: Callable[[Namespace, Path], Figures]
    ways: Sequence[str] = ()
    options: Mapping[str, Option] = field(default_factory=dict)
    about: Figures = field(default_factory=dict)
    stem: Callable[[Namespace], str] = lambda _: ""

    def arguments(self, given: Sequence[str] | None = None) -> Namespace:
        """What to measure; `ways` in order."""
        options: dict[str, Option] = {
            "--work": (Path("build"), "where a folder is made, and removed at the end"),
            "--model": (DEMO_MODEL, "a directory"),
        }
        if self.ways:
            option = "--databases" if self.ways == DATABASES else "--ways"
            options[option] = (list(self.ways), "in order", self.ways)
        args = arguments(self.name, self.doc, options | dict(self.options), given)
        args.ways = vars(args).get("databases", vars(args).get("ways", [""]))
        return args

    def main(self, given: Sequence[str] | None = None) -> None:
        """Measure, and write after each way: a run that is cut short leaves what it has.

        A result of that name is added to: ways that are measured in several calls stay together.
        """
        args, head = self.arguments(given), begun(self.name, given)
        stem = self.stem(args) or self.name.replace("_", "-")
        args.out = args.out or RESULTS / f"{stem}-{head['date']}.json"
        figures = head | {"machine": describe(vars(args).get("threads"))} | self.about
        if self.ways and args.out.is_file():
            figures = json.loads(args.out.read_text(encoding="utf-8"))
        for way in args.ways:
            args.way, folder = way, args.work / f"{self.name}-{way}".strip("-")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            found = self.measure(args, folder)
            figures |= {way: found | {"command": head["command"]}} if self.ways else found
            print(way, json.dumps(found, indent=1), flush=True)
            write_json(args.out, figures)
            shutil.rmtree(folder)


def arguments(
    name: str,
    doc: str | None,
    options: Mapping[str, Option],
    given: Sequence[str] | None = None,
    refuse: Callable[[Namespace], str | None] = lambda _: None,
) -> Namespace:
    """The arguments of `python -m benchmarks.NAME`, described by its docstring's first line.

    A list is written as words with commas between them.  refuse: says what is wrong, if anything.
    """
    parser = ArgumentParser(f"python -m benchmarks.{name}", description=str(doc).partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where the result goes")
    for option, (default, said, *known) in options.items():
        if isinstance(default, bool):
            parser.add_argument(option, action="store_true", help=said)
        elif isinstance(default, type):
            parser.add_argument(option, type=default, required=True, help=said)
        elif isinstance(default, list):
            parser.add_argument(option, type=words(*known), default=default, help=said)
        else:
            choices, kind = (known or [None])[0], type(default)
            parser.add_argument(option, type=kind, default=default, choices=choices, help=said)
    args = parser.parse_args(given)
    if wrong := refuse(args):
        parser.error(wrong)
    return args


def words(known: Collection[str]) -> Callable[[str], list[str]]:
    """For argparse: words with commas between them; unknown ones are refused."""

    def parse(text: str) -> list[str]:
        found = [word for word in text.split(",") if word]
        if unknown := sorted(set(found) - set(known)):
            raise ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return found

    return parse


def begun(name: str, given: Sequence[str] | None = None) -> Figures:
    """The head of a result: its date, the command with its arguments, the commit."""
    command = ["python", "-m", f"benchmarks.{name}", *(sys.argv[1:] if given is None else given)]
    date = datetime.now(UTC).date().isoformat()
    return {"date": date, "command": shlex.join(command), "commit": commit()}


def commit() -> str:
    """The commit, and whether the tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return done.stdout.strip()


def by_turns(
    ways: Mapping[Key, Callable[[], Made]], rounds: int, *, warm: int = 0, swapped: bool = False
) -> dict[Key, list[Made]]:
    """What each way gives in every round: taking turns, all meet the same machine.

    warm: rounds before that do not count; swapped: every second round begins with the last way.
    """
    found: dict[Key, list[Made]] = {name: [] for name in ways}
    for number in range(-warm, rounds):
        for name in list(ways)[:: -1 if swapped and number % 2 else 1]:
            found[name].append(ways[name]())
    return {name: made[warm:] for name, made in found.items()}


def seconds_of(run: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def data_beside(module: str, name: str) -> Figures:
    """The TOML file of this name in a module's folder. module: its `__file__`."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


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

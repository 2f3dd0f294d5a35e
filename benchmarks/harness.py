"""The journey of a benchmark: read its arguments, measure part after part, write its result."""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .machine import describe
from .writing import RESULTS, ROOT, Figures, begun, parser, words, write_json

DATABASES = ("sqlite", "postgresql")


@dataclass(frozen=True)
class Benchmark:
    """A command `python -m MODULE` that measures one way after another into one result.

    Args:
        measure: Given a way, the arguments and an empty folder, returns the way's part.
        ways: What can be measured; `usual`, unless all of them, when nothing is asked for.
        ways_option: The option that chooses the ways.
        options: The default of each further option, and what it is.
        about: What the result says beside the machine.
        named: The name of the result; without it, the module's.
    """

    module: str
    doc: str | None
    measure: Callable[[str, Namespace, Path], Figures]
    ways: Sequence[str] = DATABASES
    usual: Sequence[str] = ()
    ways_option: str = "--databases"
    options: Mapping[str, tuple[int | float | str, str]] = field(default_factory=dict)
    about: Figures = field(default_factory=dict)
    named: Callable[[Namespace], str] | None = None

    def arguments(self, given: Sequence[str] | None = None) -> Namespace:
        """What to measure; `ways` in order."""
        found = parser(self.module, self.doc)
        usual = list(self.usual or self.ways)
        found.add_argument(self.ways_option, dest="ways", type=words(self.ways), default=usual)
        found.add_argument("--model", type=Path, default=ROOT / "examples" / "demo_model")
        work = Path("build") / self._stem
        found.add_argument("--work", type=Path, default=work, help="emptied before")
        for name, (default, said) in self.options.items():
            found.add_argument(name, type=type(default), default=default, help=said)
        return found.parse_args(given)

    def main(self, given: Sequence[str] | None = None) -> None:
        """Measure, and write after each way: a run that is cut short leaves what it has.

        A result of that name is added to: ways that are measured in several calls stay together.
        """
        args, head = self.arguments(given), begun(self.module, given)
        figures = head | {"machine": describe(2, with_torch=False)} | self.about
        name = self._stem if self.named is None else self.named(args)
        out = args.out or RESULTS / f"{name}-{head['date']}.json"
        if out.is_file():
            figures = json.loads(out.read_text(encoding="utf-8"))
        for way in args.ways:
            folder = args.work / way
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            figures[way] = self.measure(way, args, folder) | {"command": head["command"]}
            print(way, json.dumps(figures[way], indent=1), flush=True)
            write_json(out, figures)

    @property
    def _stem(self) -> str:
        return self.module.rpartition(".")[2].replace("_", "-")

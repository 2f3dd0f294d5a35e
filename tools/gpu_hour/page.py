"""One page a stage: what passed, what failed with its first error, figures beside their goals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .apart import Outcome

ERROR_LINES = 14


@dataclass(slots=True)
class Page:
    """What a stage has found.

    text: tables and sentences of its own; faults: everything that is not as it should be, a line
    each; outcomes: of its tests.
    """

    stage: int
    title: str
    about: dict[str, Any]
    text: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    log: str = ""
    seconds: float = 0.0

    def tests(self, outcomes: Sequence[Outcome]) -> None:
        """Add test groups, and count what is wrong with them."""
        self.outcomes += outcomes
        for one in outcomes:
            if one.failed:
                self.faults.append(f"{one.name}: {len(one.failed)} failed")
            if one.not_run:
                self.faults.append(f"{one.name}: {len(one.not_run)} not run")
            if one.skipped:
                self.faults.append(f"{one.name}: {one.skipped} skipped")
            if one.note:
                self.faults.append(f"{one.name}: {one.note}")
            self.log += one.log

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def write(self) -> str:
        """The page, in Markdown."""
        verdict = "passed" if self.is_good else "FAILED"
        lines = [f"# Stage {self.stage}, {self.title}: {verdict}", ""]
        lines += [f"- {name}: {value}" for name, value in self.about.items()]
        lines += [f"- took: {self.seconds:.0f} s", ""]
        if self.faults:
            lines += ["What is wrong:", "", *(f"- {fault}" for fault in self.faults), ""]
        lines += [*self.text, *self._tests(), *self._first_error()]
        return "\n".join(lines).rstrip() + "\n"

    def _tests(self) -> list[str]:
        if not self.outcomes:
            return []
        lines = [
            "| tests | passed | failed | skipped | not run | seconds |",
            "|---|---|---|---|---|---|",
        ]
        for one in self.outcomes:
            counts = [one.passed, len(one.failed), one.skipped, len(one.not_run), one.seconds]
            lines.append(f"| {one.name} | {' | '.join(map(str, counts))} |")
        return [*lines, ""]

    def _first_error(self) -> list[str]:
        """Of each group with failures: the first is what the others often follow from."""
        lines = []
        for one in self.outcomes:
            for name, error in list(one.failed.items())[:1]:
                said = error.splitlines()[-ERROR_LINES:]
                lines += [f"First failure of {one.name}: `{name}`", "", "```", *said, "```", ""]
        return lines

    def save(self, folder: Path) -> Path:
        """Write stage-N.md, stage-N.json with every failure, and stage-N.log; returns the page."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"stage-{self.stage}"
        outcomes = [asdict(one) | {"log": ""} for one in self.outcomes]
        content = {"stage": self.stage, "title": self.title, "about": self.about}
        content |= {"faults": self.faults, "outcomes": outcomes, "seconds": self.seconds}
        stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        stem.with_suffix(".log").write_text(self.log, encoding="utf-8")
        page = stem.with_suffix(".md")
        page.write_text(self.write(), encoding="utf-8")
        return page

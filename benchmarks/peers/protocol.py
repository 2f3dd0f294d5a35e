"""How the comparison talks to a system: JSON lines over a runner's stdin and stdout.

Each system runs in a process of its own, in its own environment, so this file needs nothing but
the standard library.  Every message is one line; the runner answers each with one line:

    {"command": "load", "model": DIR, "precision": "fp32", "threads": 2, "converted": DIR}
        -> {"ok": true, "load_s": 1.2, "versions": {...}, "settings": "...", "start_mib": 300.0}
    {"command": "run", "workload": {...}}
        -> {"ok": true, "seconds": 3.4, "outcome": {...}, "peak_mib": 900.0}

A run begins with empty caches: what an earlier run left in a prefix cache is dropped first.

Whatever goes wrong comes back as {"ok": false, "error": "..."}; the end of stdin ends the runner.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

Kind = Literal["generate", "rank", "first_token"]


class UnsupportedError(Exception):
    """The system cannot do this; the message says why."""


@dataclass(frozen=True)
class Generation:
    """Continue a prompt greedily by max_tokens tokens, or up to where `stop` begins.

    Requests of a wave are handed in together; a wave begins when the one before it has ended.
    """

    token_ids: list[int]
    max_tokens: int
    stop: str | None = None
    wave: int = 0


@dataclass(frozen=True)
class Ranking:
    """Score each document by its mean negative log-likelihood after the query.

    The texts encode to exactly these token ids, for systems that take only text.
    """

    query: list[int]
    documents: list[list[int]]
    query_text: str
    document_texts: list[str]


@dataclass(frozen=True)
class Workload:
    """A named list of requests; a ranking's unit of work is one document."""

    name: str
    kind: Kind
    generations: list[Generation] = field(default_factory=list)
    rankings: list[Ranking] = field(default_factory=list)

    @property
    def units(self) -> int:
        """Requests, or ranked documents."""
        return len(self.generations) + sum(len(ranking.documents) for ranking in self.rankings)

    def head(self, units: int) -> Workload:
        """The first so many units, for systems too slow for all of them."""
        rankings = []
        left = units
        for ranking in self.rankings:
            if left > 0:
                rankings.append(
                    replace(
                        ranking,
                        documents=ranking.documents[:left],
                        document_texts=ranking.document_texts[:left],
                    )
                )
                left -= len(ranking.documents)
        return replace(self, generations=self.generations[:units], rankings=rankings)

    def whole(self, units: int) -> int:
        """The first so many units and as many more as the last ranking among them has."""
        ends = accumulate(len(ranking.documents) for ranking in self.rankings)
        return next((end for end in ends if end >= units), units)

    def waves(self) -> list[list[Generation]]:
        """The generations by wave, in the order of the waves."""
        numbers = sorted({generation.wave for generation in self.generations})
        return [[g for g in self.generations if g.wave == number] for number in numbers]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(record: dict[str, Any]) -> Workload:
        return Workload(
            name=record["name"],
            kind=record["kind"],
            generations=[Generation(**item) for item in record["generations"]],
            rankings=[Ranking(**item) for item in record["rankings"]],
        )


@dataclass(frozen=True)
class Generated:
    """A text up to its stop, and how many tokens the system computed for it."""

    text: str
    tokens: int


@dataclass
class Outcome:
    """What a workload gave: texts in the order of the generations, or mean NLLs by ranking.

    seconds_each: of a first_token workload, the time of each request alone.
    """

    generated: list[Generated] = field(default_factory=list)
    mean_nll: list[list[float]] = field(default_factory=list)
    seconds_each: list[float] = field(default_factory=list)


class System(Protocol):
    """What a runner file implements.

    versions: of the packages that matter; settings: what was chosen for this system, in words.
    """

    versions: dict[str, str]
    settings: str

    def load(self, model: Path, precision: str, threads: int, converted: Path) -> None:
        """Load a Hugging Face directory; `converted` is a place for the system's own format."""

    def reset(self) -> None:
        """Forget what earlier requests left in caches."""

    def generate(self, requests: list[Generation]) -> list[Generated]:
        """Greedy texts in the order of the requests."""

    def rank(self, rankings: list[Ranking]) -> list[list[float]]:
        """Mean NLL of each document of each ranking."""


def run_workload(system: System, workload: Workload) -> Outcome:
    """Hand a workload to a system in the order its kind asks for."""
    outcome = Outcome()
    if workload.kind == "rank":
        outcome.mean_nll = system.rank(workload.rankings)
    elif workload.kind == "first_token":
        for generation in workload.generations:
            started = time.perf_counter()
            outcome.generated += system.generate([generation])
            outcome.seconds_each.append(time.perf_counter() - started)
    else:
        by_place: dict[int, Generated] = {}
        for wave in workload.waves():
            for generation, generated in zip(wave, system.generate(wave), strict=True):
                by_place[id(generation)] = generated
        outcome.generated = [by_place[id(generation)] for generation in workload.generations]
    return outcome


def peak_mib() -> float:
    """The most memory this process and its ended children held at once, MiB."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return max(own, children) / 1024


def cut(text: str, stop: str | None) -> str:
    """The text before the stop."""
    return text if stop is None else text.partition(stop)[0]


def without_part(text: str, stop: str) -> str:
    """The text before the longest beginning of the stop that it ends in."""
    sizes = range(len(stop), 0, -1)
    return next((text[:-size] for size in sizes if text.endswith(stop[:size])), text)


def handle(system: System, message: dict[str, Any]) -> dict[str, Any]:
    """Carry out one message."""
    if message["command"] == "load":
        start_mib, started = peak_mib(), time.perf_counter()
        system.load(
            Path(message["model"]),
            message["precision"],
            message["threads"],
            Path(message["converted"]),
        )
        load_s = time.perf_counter() - started
        return {
            "load_s": load_s,
            "versions": system.versions,
            "settings": system.settings,
            "start_mib": start_mib,
        }
    workload = Workload.from_json(message["workload"])
    system.reset()
    started = time.perf_counter()
    outcome = run_workload(system, workload)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "outcome": asdict(outcome), "peak_mib": peak_mib()}


def serve(system: System) -> None:
    """Answer messages until stdin ends.  What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answer_all(system, sys.stdin, answers)


def answer_all(system: System, source: TextIO, answers: TextIO) -> None:
    """Write one answer for each message of `source`; a failure is an answer, too."""
    for line in source:
        try:
            answer = {"ok": True, **handle(system, json.loads(line))}
        except UnsupportedError as error:
            answer = {"ok": False, "error": str(error)}
        except Exception as error:  # noqa: BLE001 - reported as this system's failure
            traceback.print_exc()
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

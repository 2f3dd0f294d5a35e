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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

Kind = Literal["generate", "rank", "first_token"]


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
        rankings, left = [], units
        for one in self.rankings:
            if left > 0:
                documents, texts = one.documents[:left], one.document_texts[:left]
                rankings.append(Ranking(one.query, documents, one.query_text, texts))
                left -= len(one.documents)
        return replace(self, generations=self.generations[:units], rankings=rankings)

    def whole(self, units: int) -> int:
        """The first so many units and as many more as the last ranking among them has."""
        ends = accumulate(len(ranking.documents) for ranking in self.rankings)
        return next((end for end in ends if end >= units), units)

    def waves(self) -> list[list[Generation]]:
        """The generations by wave, in the order of the waves."""
        numbers = sorted({generation.wave for generation in self.generations})
        return [[g for g in self.generations if g.wave == number] for number in numbers]

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

    @staticmethod
    def from_json(record: dict[str, Any]) -> Outcome:
        generated = [Generated(**item) for item in record["generated"]]
        return Outcome(generated, record["mean_nll"], record["seconds_each"])


class System:
    """What a runner file implements.

    versions: of the packages that matter; settings: what was chosen for this system, in words.
    """

    versions: dict[str, str]
    settings: str

    def load(self, model: Path, precision: str, threads: int, converted: Path) -> None:
        """Load a Hugging Face directory; `converted` is a place for the system's own format."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget what earlier requests left in caches; by default nothing outlives a call."""

    def generate(self, requests: list[Generation]) -> list[Generated]:
        """Greedy texts in the order of the requests."""
        raise NotImplementedError

    def rank(self, rankings: list[Ranking]) -> list[list[float]]:
        """Mean NLL of each document of each ranking."""
        raise NotImplementedError


Item = TypeVar("Item")
Answer = TypeVar("Answer")
Pair = tuple[list[int], list[int]]
"""A query and a document of it."""


def in_batches(
    items: Sequence[Item],
    length: Callable[[Item], int],
    size: int,
    run: Callable[[list[Item]], Sequence[Answer]],
) -> list[Answer]:
    """Run batches of items of similar length; answers in the order of the items."""
    order = sorted(range(len(items)), key=lambda place: length(items[place]))
    found: dict[int, Answer] = {}
    for start in range(0, len(order), size):
        places = order[start : start + size]
        found.update(zip(places, run([items[place] for place in places]), strict=True))
    return [found[place] for place in range(len(items))]


def rank_pairs(
    rankings: list[Ranking], score: Callable[[list[Pair]], Sequence[float]]
) -> list[list[float]]:
    """Score every query with each of its documents; scores by ranking."""
    scores = iter(score([(one.query, document) for one in rankings for document in one.documents]))
    return [[next(scores) for _ in one.documents] for one in rankings]


def pad_left(rows: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids and attention mask: every row ends at the last column."""
    longest = max(map(len, rows))
    ids = [[0] * (longest - len(row)) + row for row in rows]
    return ids, [[0] * (longest - len(row)) + [1] * len(row) for row in rows]


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
        by_request: dict[int, Generated] = {}
        for wave in workload.waves():
            by_request.update(zip(map(id, wave), system.generate(wave), strict=True))
        outcome.generated = [by_request[id(generation)] for generation in workload.generations]
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
        model, converted = Path(message["model"]), Path(message["converted"])
        system.load(model, message["precision"], message["threads"], converted)
        return {
            "load_s": time.perf_counter() - started,
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
        except Exception as error:  # noqa: BLE001 - reported as this system's failure
            traceback.print_exc()
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

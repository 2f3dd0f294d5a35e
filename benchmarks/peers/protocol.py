"""How the comparison talks to a system: JSON lines over a runner's stdin and stdout.

Each system runs in a process of its own, in its own environment, so this file needs nothing but
the standard library and msgspec.  Every `Message` is one line; the runner answers each with one
`Answer`.  A run begins with empty caches: what an earlier run left in a prefix cache is dropped
first.  The end of stdin ends the runner.
"""

from __future__ import annotations

import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

Pair = tuple[list[int], list[int]]
"""A query and a document of it."""


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
    """Score each document by its mean negative log-likelihood after the query."""

    query: list[int]
    documents: list[list[int]]


@dataclass(frozen=True)
class Workload:
    """A named list of requests; a ranking's unit of work is one document."""

    name: str
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
                rankings.append(Ranking(one.query, one.documents[:left]))
                left -= len(one.documents)
        return replace(self, generations=self.generations[:units], rankings=rankings)

    def whole(self, units: int) -> int:
        """The first so many units and as many more as the last ranking among them has."""
        ends = accumulate(len(ranking.documents) for ranking in self.rankings)
        return next((end for end in ends if end >= units), units)


@dataclass(frozen=True)
class Generated:
    """A text up to its stop, and how many tokens the system computed for it."""

    text: str
    tokens: int


@dataclass
class Outcome:
    """What a workload gave: texts in the order of the generations, or mean NLLs by ranking.

    seconds_each: of each wave.
    """

    generated: list[Generated] = field(default_factory=list)
    mean_nll: list[list[float]] = field(default_factory=list)
    seconds_each: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Message:
    """What a runner is asked for: to load a Hugging Face directory, or to run a workload.

    converted: a folder for the system's own format.
    """

    run: Workload | None = None
    model: str = ""
    precision: str = ""
    threads: int = 0
    converted: str = ""


@dataclass(frozen=True)
class Answer:
    """What a message gave, or why it failed.

    seconds: of loading, or of the workload.  peak_mib: the most memory that the process ever held;
    after loading, what it held before, so Python and its libraries.
    """

    seconds: float = 0.0
    peak_mib: float = 0.0
    outcome: Outcome = field(default_factory=Outcome)
    versions: dict[str, str] = field(default_factory=dict)
    settings: str = ""
    error: str | None = None


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
        """Mean NLL of each document of each ranking; by default each pair is scored on its own."""
        pairs = [(one.query, document) for one in rankings for document in one.documents]
        scores = iter(self.score(pairs))
        return [[next(scores) for _ in one.documents] for one in rankings]

    def score(self, pairs: list[Pair]) -> Sequence[float]:
        """Mean NLL of each document after its query."""
        raise NotImplementedError


Item = TypeVar("Item")
Found = TypeVar("Found")


def in_batches(
    items: Sequence[Item],
    length: Callable[[Item], int],
    size: int,
    run: Callable[[list[Item]], Sequence[Found]],
) -> list[Found]:
    """Run batches of items of similar length; answers in the order of the items."""
    order = sorted(range(len(items)), key=lambda place: length(items[place]))
    found: dict[int, Found] = {}
    for start in range(0, len(order), size):
        places = order[start : start + size]
        found.update(zip(places, run([items[place] for place in places]), strict=True))
    return [found[place] for place in range(len(items))]


def pad_left(rows: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids and attention mask: every row ends at the last column."""
    longest = max(map(len, rows))
    ids = [[0] * (longest - len(row)) + row for row in rows]
    return ids, [[0] * (longest - len(row)) + [1] * len(row) for row in rows]


def run_workload(system: System, workload: Workload) -> Outcome:
    """Hand a workload to a system: all rankings at once, texts wave by wave."""
    outcome = Outcome()
    if workload.rankings:
        outcome.mean_nll = system.rank(workload.rankings)
    found: dict[int, Generated] = {}
    for number in sorted({generation.wave for generation in workload.generations}):
        wave = {i: g for i, g in enumerate(workload.generations) if g.wave == number}
        started = time.perf_counter()
        found.update(zip(wave, system.generate(list(wave.values())), strict=True))
        outcome.seconds_each.append(time.perf_counter() - started)
    outcome.generated = [found[place] for place in sorted(found)]
    return outcome


def peak_mib() -> float:
    """The most memory this process and its ended children held at once, MiB."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return max(own, children) / 1024


def cut(text: str, stop: str | None) -> str:
    """The text before the stop."""
    return text if stop is None else text.partition(stop)[0]


class Rows:
    """Texts that grow by a token at a time, each to its stop or to its number of tokens."""

    def __init__(self, requests: Sequence[Generation]) -> None:
        self._requests = requests
        self._texts = [""] * len(requests)
        self._counts = [0] * len(requests)
        self.ended = [False] * len(requests)

    def append(self, row: int, text: str) -> bool:
        """Add a token's text to a row that has not ended; returns whether it has ended now."""
        request = self._requests[row]
        self._texts[row] += text
        self._counts[row] += 1
        stopped = request.stop is not None and request.stop in self._texts[row]
        self.ended[row] = stopped or self._counts[row] >= request.max_tokens
        return self.ended[row]

    def generated(self) -> list[Generated]:
        """Each text up to its stop."""
        rows = zip(self._requests, self._texts, self._counts, strict=True)
        return [Generated(cut(text, request.stop), count) for request, text, count in rows]


def without_part(text: str, stop: str) -> str:
    """The text before the longest beginning of the stop that it ends in."""
    sizes = range(len(stop), 0, -1)
    return next((text[:-size] for size in sizes if text.endswith(stop[:size])), text)


def handle(system: System, message: Message) -> Answer:
    """Carry out one message."""
    if message.run is None:
        start_mib, started = peak_mib(), time.perf_counter()
        where = Path(message.model), message.precision, message.threads, Path(message.converted)
        system.load(*where)
        seconds = time.perf_counter() - started
        return Answer(seconds, start_mib, versions=system.versions, settings=system.settings)
    system.reset()
    started = time.perf_counter()
    outcome = run_workload(system, message.run)
    return Answer(time.perf_counter() - started, peak_mib(), outcome)


def serve(system: System) -> None:
    """Answer messages until stdin ends.  What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answer_all(system, sys.stdin.buffer, answers)


def answer_all(system: System, source: BinaryIO, answers: BinaryIO) -> None:
    """Write one answer for each message of `source`; a failure is an answer, too."""
    for line in source:
        try:
            answer = handle(system, msgspec.json.decode(line, type=Message))
        except Exception as error:  # noqa: BLE001 - reported as this system's failure
            traceback.print_exc()
            answer = Answer(error=f"{type(error).__name__}: {error}"[:500])
        answers.write(msgspec.json.encode(answer, enc_hook=_plain) + b"\n")
        answers.flush()


def _plain(value: object) -> str | float:
    """Of what libraries derive from str and float: torch's version, NumPy's numbers."""
    return str(value) if isinstance(value, str) else float(value)  # type: ignore[arg-type]

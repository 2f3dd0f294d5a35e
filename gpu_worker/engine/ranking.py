"""Rankings: documents scored after a query, their shared prefixes, and which can be dropped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from nightjar import kernels
from nightjar.gpu_worker.engine.kv_cache import BlockTable
from nightjar.gpu_worker.engine.sequence import Prefix
from nightjar.requests import RankRequest

MIN_SAVED_ROWS = 48
"""Rows that a shared beginning of documents must save to be worth a prefix of its own.

Such a prefix computes the end of the query again, up to a block, and runs a step before its
documents.
"""

LONG_DOCUMENT = 512
"""Tokens of a document that are computed in one piece.

All tokens but the last of a longer document are computed as a prefix of its own, in chunks and in
the cache.  This is a constant, because sums run in another order there.
"""

FIRST_PROBE = 4
"""Tokens that the first probe of a document scores when only the best are asked for.

The first token costs nothing.  Every further probe is four times as deep, so useless probes cost at
most a third of the whole.
"""


@dataclass(slots=True, eq=False)
class Document:
    """One document; `tokens` come after its part's prefix.

    scored: how many tokens its score is the mean of, those in the prefix included.
    depth: tokens scored so far; known: the sum of their NLLs, those in the prefix included.
    mean_nll: the score, once it is complete.
    """

    index: int
    tokens: list[int]
    scored: int
    depth: int = 0
    known: float = 0.0
    mean_nll: float | None = None

    @property
    def bound(self) -> float:
        """The least that the score can become: no token's NLL is negative."""
        return self.known / self.scored

    @property
    def next_depth(self) -> int:
        """How many tokens the next probe scores."""
        deeper = max(FIRST_PROBE, 4 * self.depth) if self.depth else 1
        return deeper if 2 * deeper <= len(self.tokens) else len(self.tokens)


@dataclass(slots=True, eq=False)
class RankPart:
    """Documents that follow the same prefix: the query, or the query and what they begin with.

    shared_nll: the NLLs of the prefix's scored tokens that are computed already.
    """

    prefix: Prefix
    documents: list[Document]
    shared_nll: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Branch:
    """One probe of a document: its first `depth` tokens are scored."""

    job: RankJob
    part: RankPart
    document: Document
    depth: int

    @property
    def fed(self) -> list[int]:
        """The tokens that run through the model; the last one is only predicted."""
        return self.document.tokens[: self.depth - 1]

    @property
    def padding(self) -> int:
        """The rows by which attention pads the probe; 0 where it feeds no token."""
        if self.depth == 1:
            return 0
        return kernels.padded_length(len(self.document.tokens) - 1) - (self.depth - 1)


@dataclass(slots=True, eq=False)
class RankJob:
    """A ranking request and the known NLLs of its documents.

    With `top_n`, documents that cannot be among the best are dropped.  Token NLLs are not negative,
    so the sum of the known ones, over the full length, bounds the mean from below.  Dropped
    documents do not change how the others are computed.  So the best documents and their scores are
    the same as without dropping.
    """

    request: RankRequest
    arrival: int
    parts: list[RankPart]
    waiting: dict[Document, RankPart] = field(default_factory=dict)
    done: list[Document] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting = {document: part for part in self.parts for document in part.documents}

    @property
    def request_id(self) -> int:
        """The request's id."""
        return self.request.request_id

    @property
    def order(self) -> tuple[bool, int]:
        """Its place among the requests that wait: urgent ones first, then by arrival."""
        return not self.request.urgent, self.arrival

    @property
    def wanted(self) -> int:
        """How many of the best documents must be complete."""
        count = self.request.top_n
        total = len(self.request.documents)
        return total if count is None else min(count, total)

    @property
    def tables(self) -> list[BlockTable]:
        """The blocks that the ranking holds."""
        return [part.prefix.table for part in self.parts if part.prefix.table is not None]

    @property
    def is_on_trust(self) -> bool:
        """Whether the ranking reads blocks of other requests."""
        return any(part.prefix.borrowed for part in self.parts)

    @property
    def token_counts(self) -> list[int]:
        """How many tokens each document's score is the mean of."""
        found = {d.index: d.scored for part in self.parts for d in part.documents}
        return [found[index] for index in range(len(found))]

    @property
    def cached_tokens(self) -> int:
        """How many tokens the cache held: of the query once, and of what documents begin with."""
        query = len(self.request.query_ids)
        cached = [part.prefix.cached for part in self.parts]
        return min(cached[0], query) + sum(max(0, count - query) for count in cached)

    @property
    def pruned_tokens(self) -> int:
        """How many tokens of documents were not scored, as those cannot be among the best."""
        documents = [document for part in self.parts for document in part.documents]
        return sum(len(document.tokens) - document.depth for document in documents)

    @property
    def is_finite(self) -> bool:
        """Whether all known NLLs are finite."""
        return all(math.isfinite(d.known) for part in self.parts for d in part.documents)

    def candidates(self, ready: Sequence[RankPart]) -> Iterator[Branch]:
        """Return the probes that can be made now, of documents whose prefix is computed."""
        of_ready = [item for item in self.waiting.items() if item[1] in ready]
        if self.wanted == len(self.request.documents):
            for document, part in of_ready:
                yield Branch(self, part, document, len(document.tokens))
            return
        # The first probe is free, and tells the order of the others.
        fresh = [item for item in of_ready if item[0].depth == 0]
        if fresh:
            for document, part in fresh:
                yield Branch(self, part, document, 1)
            return
        order = sorted(of_ready, key=lambda item: (item[0].bound, item[0].index))
        missing = self.wanted - len(self.done)
        for document, part in order[:missing] if missing > 0 else order:
            depth = len(document.tokens) if missing > 0 else document.next_depth
            yield Branch(self, part, document, depth)

    def add(self, branch: Branch, nll: np.ndarray) -> None:
        """Add the result of a probe: float64 NLLs of its scored tokens."""
        document, part = branch.document, branch.part
        shared = math.fsum(float(x) for piece in part.shared_nll for x in piece)
        document.depth = branch.depth
        document.known = shared + float(nll.sum())
        if branch.depth == len(document.tokens):
            document.mean_nll = document.known / document.scored
            del self.waiting[document]
            self.done.append(document)

    def prune(self) -> None:
        """Drop the documents that cannot be among the wanted ones."""
        if len(self.done) < self.wanted or self.wanted == len(self.request.documents):
            return
        best = sorted(document.bound for document in self.done)[self.wanted - 1]
        # Equal scores stay: they are decided by the documents' order.  The slack covers the
        # rounding of sums in another order.
        limit = best + 1e-9 * abs(best)
        for document in [d for d in self.waiting if d.bound > limit]:
            del self.waiting[document]

    def scores(self) -> list[float | None]:
        """Return the score of each document, None for a dropped one."""
        found: list[float | None] = [None] * len(self.request.documents)
        for document in self.done:
            found[document.index] = document.mean_nll
        return found


def shared_beginnings(
    documents: Sequence[Sequence[int]], longest: int
) -> list[tuple[int, list[int]]]:
    """Return the groups of documents with a common beginning: (its length, their indices).

    Every document is in one group; documents that share too little are in the group of length 0.  A
    beginning has at most `longest` tokens and leaves every document one token.
    """
    order = sorted(range(len(documents)), key=lambda index: list(documents[index]))
    common = [min(_common(documents[a], documents[b]), longest) for a, b in pairwise(order)]
    levels = sorted({length for length in common if length > 0})
    if not levels:
        return [(0, list(range(len(documents))))]
    # A few levels are as good as all of them.
    tried = levels[:: max(1, len(levels) // 16)]
    saved, best = max(
        ((sum(map(_saved, groups)), groups) for groups in (_cut(common, n) for n in tried)),
        key=lambda item: item[0],
    )
    shared = [group for group in best if _saved(group) > 0] if saved > 0 else []
    found = [(length, sorted(order[first : last + 1])) for first, last, length in shared]
    taken = {index for _, members in found for index in members}
    rest = [index for index in range(len(documents)) if index not in taken]
    return [(0, rest), *found] if rest else found


def apart_if_long(
    groups: Sequence[tuple[int, list[int]]], documents: Sequence[Sequence[int]]
) -> Iterator[tuple[int, list[int]]]:
    """Return the groups of `shared_beginnings`, with long documents in groups of their own.

    A document is long if more than LONG_DOCUMENT tokens follow the beginning.  The beginning of its
    own group is all but its last token.
    """
    for length, members in groups:
        longest = length + LONG_DOCUMENT
        if short := [index for index in members if len(documents[index]) <= longest]:
            yield length, short
        for index in members:
            if len(documents[index]) > longest:
                yield len(documents[index]) - 1, [index]


def _saved(group: tuple[int, int, int]) -> int:
    """Return the rows that a group (first, last, length) saves."""
    first, last, length = group
    return (last - first) * length - MIN_SAVED_ROWS


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two documents begin with together; the last of each does not count."""
    most = min(len(a), len(b)) - 1
    return next((i for i in range(most) if a[i] != b[i]), most)


def _cut(common: Sequence[int], level: int) -> list[tuple[int, int, int]]:
    """Yield runs (first, last, length) of ordered documents whose neighbours share `level` tokens
    or more."""
    groups, first = [], 0
    for index in range(len(common) + 1):
        if index == len(common) or common[index] < level:
            if index > first:
                groups.append((first, index, min(common[first:index])))
            first = index + 1
    return groups

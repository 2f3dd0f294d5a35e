"""Beam search over one request: which sequences continue, which are finished, when it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from nightjar.requests import BeamSearch

Output = TypeVar("Output")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running sequence that is longer by one token.

    parent: the sequence's number among the running ones; total: the sum of the log-probabilities of
    the new sequence's tokens.
    """

    parent: int
    token: int
    total: float


@dataclass(frozen=True, slots=True)
class Finished(Generic[Output]):
    """A finished sequence, the sum of its tokens' log-probabilities, and its score."""

    output: Output
    total: float
    score: float


class BeamState(Generic[Output]):
    """The beams of one request, chosen in the way of transformers' `generate`.

    The caller keeps the sequences and their caches, and at each step:
    1. asks for the `candidates`;
    2. calls `finish` for each whose token ends its text (an end token, a stop, max_tokens) and
       whose rank `may_finish`; other ended candidates are dropped;
    3. hands those that did not end to `keep`; continues the sequences it returns, unless `done`.
    """

    def __init__(self, search: BeamSearch) -> None:
        self._search = search
        self._totals = [0.0]
        self._length = 0
        self.finished: list[Finished[Output]] = []

    @staticmethod
    def candidates_per_beam(search: BeamSearch, end_tokens: int) -> int:
        """How many best tokens of each running sequence are needed.

        If all tokens that end a sequence are among them, `width` others are left.
        """
        return search.width + end_tokens

    def candidates(self, best: Sequence[Sequence[tuple[int, float]]]) -> list[Candidate]:
        """Return the best continuations of all running sequences, best first.

        best: for each running sequence, its best (token, log-probability).  Equal sums go to the
        earlier sequence, then to the lower token.
        """
        self._length += 1
        found = [
            Candidate(parent, token, total + log_prob)
            for parent, (total, tokens) in enumerate(zip(self._totals, best, strict=True))
            for token, log_prob in tokens
        ]
        return sorted(found, key=lambda one: (-one.total, one.parent, one.token))

    def may_finish(self, rank: int) -> bool:
        """Whether a candidate of this rank can be a result; the others only replace ended ones."""
        return rank < self._search.width

    def finish(self, output: Output, total: float) -> None:
        """Add a sequence that ends with this step's token; the best `width` are kept."""
        self.finished.append(Finished(output, total, self._score(total)))
        # A stable sort: of equal scores the earlier one stays.
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[self._search.width :]

    def keep(self, going: Sequence[Candidate]) -> list[Candidate]:
        """Return the sequences that continue, in order, of the candidates that did not end."""
        kept = list(going[: self._search.width])
        self._totals = [candidate.total for candidate in kept]
        return kept

    @property
    def done(self) -> bool:
        """Whether the search is over.

        It is over when no sequence runs. With enough finished sequences it is also over when the
        running ones are not expected to pass them.
        """
        if not self._totals:
            return True
        if len(self.finished) < self._search.width:
            return False
        best_running = self._score(self._totals[0])
        return self._search.early_stopping or best_running <= self.finished[-1].score

    def _score(self, total: float) -> float:
        return total / math.pow(self._length, self._search.length_penalty)

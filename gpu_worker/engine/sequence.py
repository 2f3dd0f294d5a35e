"""The state of a request inside the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nightjar.gpu_worker.engine.kv_cache import BlockTable
from nightjar.gpu_worker.engine.logits_processors import LogitsProcessors
from nightjar.gpu_worker.engine.requests import (
    FinishReason,
    GenerateOutput,
    SamplingParams,
    TokenLogprobs,
)
from nightjar.gpu_worker.engine.stopping import StopMatcher


@dataclass(slots=True, eq=False)
class GenerateSequence:
    """A text being continued.

    The first group is filled on arrival, `table` by the scheduler, the rest by the loop as
    tokens come.  vector_base: first row of the request's vectors in the engine's store.
    arrival: place in the order of arrival, over both kinds of request.  ends: the tokens that end
    the text; processors: None where the request leaves the scores alone; sample: which of the
    request's n samples this is.
    """

    request_id: int
    prompt: list[int]
    sampling: SamplingParams
    matcher: StopMatcher
    vector_base: int
    arrival: int
    ends: Mapping[int, FinishReason] = field(default_factory=dict)
    processors: LogitsProcessors | None = None
    sample: int = 0

    table: BlockTable | None = None

    generated: list[int] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def max_cached(self) -> int:
        """Positions the cache can come to hold: the last token generated is never fed back."""
        return len(self.prompt) + self.sampling.max_tokens - 1

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.prompt) + len(self.generated)

    def output(self, reason: FinishReason, end: int | None) -> GenerateOutput:
        """The text as it is finished: its first `end` bytes, or all of them."""
        text = b"".join(self.pieces)[:end]
        if self.sampling.logprobs is None:
            return GenerateOutput(self.generated, text, reason)
        total = math.fsum(step.chosen for step in self.logprobs)
        return GenerateOutput(self.generated, text, reason, self.logprobs, total)


@dataclass(slots=True, eq=False)
class RankSequence:
    """A query and its documents being scored, over one step or several.

    `table` holds the query's keys and values from its first step to its last; query_hidden
    [H] is the query's last hidden state, from which every document's first token is scored.
    next_document: the first document not yet scored; mean_nll and token_counts hold the others.
    """

    request_id: int
    query: list[int]
    documents: list[list[int]]
    vector_base: int
    arrival: int

    table: BlockTable | None = None

    query_hidden: Tensor | None = None
    next_document: int = 0
    mean_nll: list[float] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RankPiece:
    """The part of a ranking that one step computes: documents [start, end), and the query too
    when its keys and values are not cached yet."""

    sequence: RankSequence
    start: int
    end: int

    @property
    def runs_query(self) -> bool:
        """Whether this step computes the query."""
        return self.sequence.query_hidden is None

    @property
    def documents(self) -> list[list[int]]:
        """The documents of this piece."""
        return self.sequence.documents[self.start : self.end]

    @property
    def has_rows(self) -> bool:
        """Whether anything is left to run: a document of one token is scored from the query."""
        return self.runs_query or any(len(document) > 1 for document in self.documents)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: new texts, running texts, parts of rankings."""

    prefills: list[GenerateSequence]
    decodes: list[GenerateSequence]
    ranks: list[RankPiece]

    def __bool__(self) -> bool:
        return bool(self.prefills or self.decodes or self.ranks)

    @property
    def admits_any(self) -> bool:
        """Whether anything joins the running texts."""
        return bool(self.prefills or self.ranks)

    @property
    def sequences(self) -> list[GenerateSequence | RankSequence]:
        """Every request that takes part."""
        return [*self.prefills, *self.decodes, *(piece.sequence for piece in self.ranks)]

    @property
    def has_rows(self) -> bool:
        """Whether the model has anything to run."""
        return bool(self.prefills or self.decodes or any(piece.has_rows for piece in self.ranks))

    def singles(self) -> list[StepPlan]:
        """The same work, one request at a time."""
        return [
            *(StepPlan([sequence], [], []) for sequence in self.prefills),
            *(StepPlan([], [sequence], []) for sequence in self.decodes),
            *(StepPlan([], [], [piece]) for piece in self.ranks),
        ]


@dataclass(frozen=True, slots=True)
class Choice:
    """The token that a text goes on with, and what its request wants to know about it.

    candidates: for a beam, the best (token, log-probability) of those that may be chosen.
    """

    token: int
    logprobs: TokenLogprobs | None = None
    candidates: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step computed.

    tokens: (sequence, what it goes on with), None where the row's scores were not finite.
    ranks: (piece, query's last hidden state [H], per document of the piece float64 NLLs of its
    scored tokens).
    failures: (sequence, error) of requests whose computation raised.
    """

    tokens: list[tuple[GenerateSequence, Choice | None]] = field(default_factory=list)
    ranks: list[tuple[RankPiece, torch.Tensor, list[np.ndarray]]] = field(default_factory=list)
    failures: list[tuple[GenerateSequence | RankSequence, Exception]] = field(default_factory=list)

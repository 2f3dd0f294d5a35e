"""Prompts and the sequences that follow them, inside the engine."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field

from torch import Tensor

from nightjar.gpu_worker.engine.adapters import Tuning
from nightjar.gpu_worker.engine.beams import BeamState
from nightjar.gpu_worker.engine.kv_cache import BlockTable
from nightjar.gpu_worker.engine.logits_processors import LogitsProcessors
from nightjar.gpu_worker.engine.requests import FinishReason, GenerateOutput, TokenLogprobs
from nightjar.gpu_worker.engine.stopping import StopMatcher
from nightjar.requests import GenerateRequest, SamplingParams


@dataclass(slots=True, eq=False)
class Prefix:
    """Tokens that are computed once and read by all sequences after them: a prompt, or a query.

    tuning: what ids past the vocabulary name, and the adapter of all rows.
    keys: the prefix cache's keys of its beginnings, one for each grain of the pool; none where it
    shares nothing.
    scored_from: the first position whose token is scored; len(tokens) for none.  Tokens with which
    several documents begin are part of the prefix.
    max_blocks: the blocks it reserves, for itself and for its forks.
    computed: positions whose keys and values are in the cache; borrowed: whether other requests
    computed some of them; cached: positions that were there when it was opened.  last_hidden [H]:
    the hidden state of the last token, kept while a token must still be predicted from it.
    """

    tokens: list[int]
    tuning: Tuning
    keys: list[bytes]
    scored_from: int
    max_blocks: int
    table: BlockTable | None = None
    computed: int = 0
    borrowed: bool = False
    cached: int = 0
    last_hidden: Tensor | None = None

    @property
    def is_computed(self) -> bool:
        """Whether the whole prefix is in the cache."""
        return self.computed == len(self.tokens)

    @property
    def held(self) -> BlockTable:
        """The blocks of a prefix that is being computed or read."""
        if self.table is None:
            raise RuntimeError("a prefix was planned without cache blocks")
        return self.table

    def drop(self) -> None:
        """Free the blocks."""
        if self.table is not None:
            self.table.free()
        self.table, self.last_hidden = None, None


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a sequence ends, and how many of its bytes are kept; None: all."""

    reason: FinishReason
    length: int | None


@dataclass(slots=True, eq=False)
class GenerateSequence:
    """One sequence that generates: a request's only one, one of its samples, or a beam.

    sample: its number among the samples.  processors: None where the request does not change the
    scores.  table: the prompt's blocks and its own, from the end of its first step on.  The loop
    fills the other fields as tokens come.
    """

    job: GenerateJob
    sample: int
    matcher: StopMatcher
    processors: LogitsProcessors | None
    table: BlockTable | None = None
    generated: list[int] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def request_id(self) -> int:
        """The request's id."""
        return self.job.request_id

    @property
    def sampling(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.job.request.sampling

    @property
    def ends(self) -> Mapping[int, FinishReason]:
        """The tokens that end the sequence."""
        return self.job.ends

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.job.prefix.tokens) + len(self.generated)

    @property
    def held(self) -> BlockTable:
        """The blocks of a running sequence."""
        if self.table is None:
            raise RuntimeError(f"request {self.request_id} runs without cache blocks")
        return self.table

    def add(self, token: int, piece: bytes) -> Ending | None:
        """Add the next token and its bytes; return how the sequence ends, if this token ends it.

        A stop string wins over the length.
        """
        self.generated.append(token)
        reason = self.ends.get(token)
        if reason is not None:
            return Ending(reason, None)
        self.pieces.append(piece)
        begin = self.matcher.feed(piece)
        if begin is not None:
            return Ending("stop", begin)
        if len(self.generated) == self.sampling.max_tokens:
            return Ending("length", None)
        return None

    def branch(self) -> GenerateSequence:
        """Return a copy of the sequence without blocks, which can continue differently."""
        return GenerateSequence(
            self.job,
            self.sample,
            copy(self.matcher),
            self.processors,  # the processors of a search keep no counts
            generated=list(self.generated),
            pieces=list(self.pieces),
            logprobs=list(self.logprobs),
        )

    def output(self, ending: Ending) -> GenerateOutput:
        """Return the output of the finished sequence."""
        text = b"".join(self.pieces)[: ending.length]
        if self.sampling.logprobs is None:
            return GenerateOutput(self.generated, text, ending.reason)
        total = math.fsum(step.chosen for step in self.logprobs)
        return GenerateOutput(self.generated, text, ending.reason, self.logprobs, total)


@dataclass(slots=True, eq=False)
class GenerateJob:
    """A generation request: its prompt, and the sequences after it.

    ends: the tokens that end a sequence; vocab_size: of the model.  waiting: samples that have not
    started; running: started samples; finished: the outputs of ended samples.  beams: the state of
    a beam search; spare: blocks reserved for its sequences that have not begun.
    """

    request: GenerateRequest
    arrival: int
    prefix: Prefix
    ends: Mapping[int, FinishReason]
    vocab_size: int
    waiting: deque[GenerateSequence] = field(default_factory=deque)
    running: list[GenerateSequence] = field(default_factory=list)
    finished: dict[int, GenerateOutput] = field(default_factory=dict)
    beams: BeamState[GenerateOutput] | None = None
    spare: BlockTable | None = None

    @property
    def request_id(self) -> int:
        """The request's id."""
        return self.request.request_id

    @property
    def order(self) -> tuple[bool, int]:
        """Its place among the requests that wait: urgent ones first, then by arrival."""
        return not self.request.urgent, self.arrival

    def make_processors(self) -> LogitsProcessors | None:
        """Make the processors of one sequence; None where the request changes no score."""
        params = self.request.sampling
        if not LogitsProcessors.needed(params):
            return None
        return LogitsProcessors(params, self.prefix.tokens, self.ends, self.vocab_size)

    @property
    def tables(self) -> list[BlockTable]:
        """The blocks that the request holds."""
        held = [self.prefix.table, *(sequence.table for sequence in self.running)]
        return [table for table in held if table is not None]

    @property
    def is_on_trust(self) -> bool:
        """Whether it reads blocks of other requests and has no finite scores of its own yet."""
        return self.prefix.borrowed and not self.running and not self.finished

    @property
    def max_length(self) -> int:
        """The most positions of one sequence: its last token is never fed back."""
        return len(self.prefix.tokens) + self.request.sampling.max_tokens - 1


@dataclass(frozen=True, slots=True)
class Choice:
    """The next token of a sequence, and what its request asked to report about it.

    candidates: for a beam, the best (token, log-probability) of those that may be chosen.
    """

    token: int
    logprobs: TokenLogprobs | None = None
    candidates: tuple[tuple[int, float], ...] = ()

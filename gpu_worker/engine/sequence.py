"""Prompts and the texts that follow them, inside the engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from nightjar.gpu_worker.engine.kv_cache import BlockTable
from nightjar.gpu_worker.engine.requests import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    SamplingParams,
)
from nightjar.gpu_worker.engine.stopping import StopMatcher


@dataclass(slots=True, eq=False)
class Prefix:
    """Tokens that are computed once and read by all that follows them: a prompt, or a query.

    keys: the prefix-cache key of each whole block.
    scored_from: the first position whose token is scored; len(tokens) for none.  (Where documents
    begin with the same tokens, these stand here and not in each of them.)
    max_blocks: what it reserves, for itself and for what is forked from it.
    computed: positions whose keys and values are in the cache.  last_hidden [H]: the hidden state
    of the last token, kept while something still waits to be predicted from it.
    """

    tokens: list[int]
    vector_base: int
    keys: list[bytes]
    scored_from: int
    max_blocks: int
    table: BlockTable | None = None
    computed: int = 0
    last_hidden: Tensor | None = None

    @property
    def is_computed(self) -> bool:
        """Whether all of it is in the cache."""
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


@dataclass(slots=True, eq=False)
class GenerateSequence:
    """One text being written: a request's only one, or one of its samples.

    sample: its place among the samples.  `table` holds the prompt's blocks and its own, from the
    end of its first step on; the rest is filled by the loop as tokens come.
    """

    text: TextJob
    sample: int
    matcher: StopMatcher
    table: BlockTable | None = None
    generated: list[int] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)

    @property
    def request_id(self) -> int:
        """The request's id."""
        return self.text.request_id

    @property
    def sampling(self) -> SamplingParams:
        """How the text is continued."""
        return self.text.request.sampling

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.text.prefix.tokens) + len(self.generated)

    @property
    def held(self) -> BlockTable:
        """The blocks of a running text."""
        if self.table is None:
            raise RuntimeError(f"request {self.request_id} runs without cache blocks")
        return self.table

    def output(self, reason: FinishReason, end: int | None) -> GenerateOutput:
        """The text as it is finished: its first `end` bytes, or all of them."""
        return GenerateOutput(self.generated, b"".join(self.pieces)[:end], reason)


@dataclass(slots=True, eq=False)
class TextJob:
    """A generation request: its prompt, and the texts that follow it.

    waiting: samples that have not started; running: those that have; finished: the others' texts,
    by sample.
    """

    request: GenerateRequest
    arrival: int
    prefix: Prefix
    waiting: deque[GenerateSequence] = field(default_factory=deque)
    running: list[GenerateSequence] = field(default_factory=list)
    finished: dict[int, GenerateOutput] = field(default_factory=dict)

    @property
    def request_id(self) -> int:
        """The request's id."""
        return self.request.request_id

    @property
    def tables(self) -> list[BlockTable]:
        """The blocks it holds."""
        held = [self.prefix.table, *(sequence.table for sequence in self.running)]
        return [table for table in held if table is not None]

    @property
    def max_length(self) -> int:
        """Positions that one text can come to hold: the last token is never fed back."""
        return len(self.prefix.tokens) + self.request.sampling.max_tokens - 1

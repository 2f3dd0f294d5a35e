"""What is asked of the engine and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "eos"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a text is continued and where it ends.

    temperature 0 takes the best token; top_k 0 and top_p 1 are off.  The draw of step n depends
    on (seed, n) alone.  stop: byte strings; the text ends where the first of them begins.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[bytes, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Continue a prompt.  An id at or past the vocabulary V means row `id - V` of the request's
    prompt vectors, here and in RankRequest."""

    request_id: int
    token_ids: Sequence[int]
    sampling: SamplingParams
    prompt_vectors: str | None = None


@dataclass(frozen=True, slots=True)
class RankRequest:
    """Score documents by their likelihood after a query."""

    request_id: int
    query_ids: Sequence[int]
    documents: Sequence[Sequence[int]]
    prompt_vectors: str | None = None


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A finished text.

    token_ids: everything generated, the end-of-text token and the stop included.
    text: the bytes before the stop, which may end inside a character.
    """

    request_id: int
    token_ids: list[int]
    text: bytes
    finish_reason: FinishReason
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class RankResult:
    """Scores in the order of the documents: lower is better.

    mean_nll: mean negative log-likelihood over the scored tokens of each document;
    token_counts: how many those are (a prompt vector inside a document is read, not scored).
    """

    request_id: int
    mean_nll: list[float]
    token_counts: list[int]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request that cannot be answered; the others are not touched."""

    request_id: int
    code: str
    message: str


Request = GenerateRequest | RankRequest
Result = GenerateResult | RankResult | RequestFailed

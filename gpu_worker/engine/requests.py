"""What is asked of the engine and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "eos"]


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search as transformers does it.

    A text's score is the sum of its tokens' log-probabilities over (its length in tokens) **
    length_penalty.  early_stopping: end as soon as `width` texts are finished; else only when the
    running ones, at their present length, cannot pass the worst of them any more.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a text is continued and where it ends.

    temperature 0 takes the best token; top_k 0, top_p 1 and min_p 0 are off.  The draw of step s
    of sample i depends on (seed, i, s) alone.

    repetition_penalty (off: 1) counts the tokens of prompt and answer, presence_penalty and
    frequency_penalty (off: 0) those of the answer.  logit_bias: what is added to the scores of
    token ids.  bad_words: token sequences that the answer never holds; their last token is
    blocked where it would complete one.

    stop: byte strings; the text ends where the first of them begins.  stop_token_ids end the text
    like a stop and add nothing to it.  min_tokens: before so many tokens no end-of-text or stop
    token is chosen, and a stop string ends the text only if a later token completes it (as vLLM).

    n: independent samples of one prompt.  beams: search instead of sampling, and return the n
    best texts.  logprobs: how many of the best tokens to report at each step, with their
    log-probabilities and that of the token chosen; None reports nothing.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop: tuple[bytes, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1
    beams: BeamSearch | None = None
    logprobs: int | None = None


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
    """Score documents by their likelihood after a query.

    top_n: how many of the best are asked for; None for all.  Documents that cannot be among them
    may be left without a score.
    """

    request_id: int
    query_ids: Sequence[int]
    documents: Sequence[Sequence[int]]
    prompt_vectors: str | None = None
    top_n: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (nats) at one step, of the model's own distribution: before bias,
    penalties, bans and temperature.

    chosen: of the token that was chosen; top: (token id, log-probability) of the best, in order.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """One finished text.

    token_ids: everything generated, the end-of-text token and the stop included.
    text: the bytes before the stop, which may end inside a character.
    logprobs: one entry a token, if they were asked for; cumulative_logprob is their sum, and is
    there for beams too.
    """

    token_ids: list[int]
    text: bytes
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """The finished texts of a request: samples in order, or beams from the best score down.

    recomputed_in: the higher precision that the request was computed in again, because the
    model's own gave scores that are not finite.
    """

    request_id: int
    outputs: list[GenerateOutput]
    prompt_tokens: int
    recomputed_in: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """The first output's tokens; the only ones unless the request asked for several."""
        return self.outputs[0].token_ids

    @property
    def text(self) -> bytes:
        """The first output's text."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first output ended."""
        return self.outputs[0].finish_reason


@dataclass(frozen=True, slots=True)
class RankResult:
    """Scores in the order of the documents: lower is better.

    mean_nll: mean negative log-likelihood over the scored tokens of each document; None where
    top_n was asked for and the document cannot be among the best.
    token_counts: how many those tokens are (a prompt vector inside a document is read, not
    scored).  recomputed_in: as in GenerateResult.
    """

    request_id: int
    mean_nll: list[float | None]
    token_counts: list[int]
    prompt_tokens: int
    recomputed_in: str | None = None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request that cannot be answered; the others are not touched."""

    request_id: int
    code: str
    message: str


Request = GenerateRequest | RankRequest
Result = GenerateResult | RankResult | RequestFailed

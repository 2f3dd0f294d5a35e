"""The engine's results; the requests are in `nightjar/requests.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "eos"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (nats) of one step, of the model's own distribution.

    Bias, penalties, bans and temperature do not change them.
    chosen: of the chosen token; top: (token id, log-probability) of the best, in order.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """One finished sequence.

    token_ids: all generated tokens, the end-of-text token and the stop included.
    text: the bytes before the stop; they may end inside a character.
    logprobs: one entry a token, if they were asked for.  cumulative_logprob: their sum; beams have
    it too.
    """

    token_ids: list[int]
    text: bytes
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """The finished sequences of a request: samples in order, or beams from the best score down.

    recomputed_in: the higher precision in which the request was computed again, because the
    model's own precision gave scores that are not finite.  cached_tokens: of the prompt, those that
    the prefix cache held.
    """

    request_id: int
    outputs: list[GenerateOutput]
    prompt_tokens: int
    recomputed_in: str | None = None
    cached_tokens: int = field(default=0, compare=False)

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
    token_counts: the number of scored tokens of each document (a prompt vector is read, not
    scored).  recomputed_in, cached_tokens: as in GenerateResult.  pruned_tokens: tokens of dropped
    documents that were not scored.
    """

    request_id: int
    mean_nll: list[float | None]
    token_counts: list[int]
    prompt_tokens: int
    recomputed_in: str | None = None
    cached_tokens: int = field(default=0, compare=False)
    pruned_tokens: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request that cannot be answered; other requests are not affected."""

    request_id: int
    code: str
    message: str


Result = GenerateResult | RankResult | RequestFailed

"""What the engine answers; what it is asked is in `nightjar/requests.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "eos"]


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
    """One finished sequence.

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
    """The finished sequences of a request: samples in order, or beams from the best score down.

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


Result = GenerateResult | RankResult | RequestFailed

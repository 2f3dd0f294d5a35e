"""Refuses sampling parameters that are out of range, contradictory, or too large."""

from __future__ import annotations

from collections.abc import Sequence

from nightjar.gpu_worker.engine.errors import RefusedError
from nightjar.requests import (
    LIMITS,
    MAX_BAD_WORD_SEQUENCES,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_STOPS_BYTES,
    SAME_IN_BODY,
    SamplingParams,
    contradictions,
)

# The vocabulary bounds top_k and the context max_tokens; any 64 bits are a seed.
_RANGES = tuple(
    name
    for name in SAME_IN_BODY
    if name in LIMITS and name not in {"top_k", "max_tokens", "min_tokens"}
)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise RefusedError for parameters that describe no distribution or no end."""
    _check_ranges(params)
    _check_ends(params, vocab_size)
    _check_processors(params, vocab_size)
    if (beams := params.beams) is not None:
        _require_within("beam_width", beams.width)
        _require_within("length_penalty", beams.length_penalty)
    for field, words in contradictions(params, None if beams is None else beams.width):
        _require(False, f"{field} {words}")


def _require(fine: bool, message: str) -> None:
    if not fine:
        raise RefusedError("invalid_sampling", message)


def _require_within(name: str, value: float, called: str | None = None) -> None:
    """Check a value against the limit of the field `name`; `called` names it in the message."""
    limit = LIMITS[name]
    ends = f"must be from {limit.low:g} to {limit.high:g}"
    if limit.above:
        ends = f"must be more than {limit.low:g} and at most {limit.high:g}"
    _require(limit.holds(value), f"{called or name} is {value}: {ends}")


def _require_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    for token in (min(ids), max(ids)) if ids else ():
        _require(
            0 <= token < vocab_size,
            f"{name}: token id {token} is not in the model's vocabulary of {vocab_size}",
        )


def _check_ranges(params: SamplingParams) -> None:
    """Raise for a number outside its limit, except for those that are checked elsewhere."""
    for name in _RANGES:
        value = getattr(params, name)
        if value is not None:
            _require_within(name, value)
    _require(params.top_k >= 0, f"top_k is {params.top_k}: must be 0 (off) or more")


def _check_ends(params: SamplingParams, vocab_size: int) -> None:
    _require(params.max_tokens >= 1, f"max_tokens is {params.max_tokens}: must be at least 1")
    _require(params.min_tokens >= 0, f"min_tokens is {params.min_tokens}: must be 0 or more")
    stops, size = len(params.stop), sum(map(len, params.stop))
    _require(stops <= MAX_STOPS, f"stop: {stops} stops: at most {MAX_STOPS}")
    _require(all(params.stop), "stop: a stop string is empty")
    _require(size <= MAX_STOPS_BYTES, f"stop: {size} bytes in all: at most {MAX_STOPS_BYTES}")
    ids = params.stop_token_ids
    _require(
        len(ids) <= MAX_STOP_TOKEN_IDS,
        f"stop_token_ids: {len(ids)} ids: at most {MAX_STOP_TOKEN_IDS}",
    )
    _require_ids("stop_token_ids", ids, vocab_size)


def _check_processors(params: SamplingParams, vocab_size: int) -> None:
    bias = params.logit_bias
    _require(
        len(bias) <= MAX_LOGIT_BIAS, f"logit_bias: {len(bias)} tokens: at most {MAX_LOGIT_BIAS}"
    )
    _require_ids("logit_bias", list(bias), vocab_size)
    for token, value in bias.items():
        _require_within("logit_bias", value, f"logit_bias of token {token}")
    words = params.bad_words
    _require(
        len(words) <= MAX_BAD_WORD_SEQUENCES,
        f"bad_words: {len(words)} words: at most {MAX_BAD_WORD_SEQUENCES}",
    )
    _require(all(words), "bad_words: a word has no tokens")
    for word in words:
        _require_ids("bad_words", word, vocab_size)
    blocked = len({word[-1] for word in words}.union(params.stop_token_ids))
    _require(
        2 * blocked <= vocab_size,
        f"bad_words and stop_token_ids can block {blocked} of the model's {vocab_size} tokens: "
        "at most half of them",
    )

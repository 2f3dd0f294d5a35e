"""Sampling parameters that are refused: out of range, contradictory, or too large."""

from __future__ import annotations

from collections.abc import Sequence

from nightjar.gpu_worker.engine.errors import RefusedError
from nightjar.gpu_worker.engine.requests import BeamSearch, SamplingParams

# As much as a request body may hold (jobs/bodies.py), so that no request is accepted there and
# refused here.
MAX_STOPS = 16
MAX_STOPS_BYTES = 16_384
"""All stops of a request together: each byte costs a row in the automaton."""
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 2_048
"""Token sequences: a text becomes two of them, with and without a leading space."""
MAX_LOGIT_BIAS = 1_024
MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_BEAMS = 128
MAX_TEMPERATURE = 100.0
"""Next to no difference between tokens is left far below it; FP32 ends at 3e38."""
REPETITION_PENALTY = (0.01, 100.0)
"""Far past use, and near enough to 1 that no score overflows."""


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise RefusedError for parameters that describe no distribution or no end."""
    _check_draw(params)
    _check_ends(params, vocab_size)
    _check_processors(params, vocab_size)
    _check_outputs(params)
    if params.beams is not None:
        _check_beams(params, params.beams)


def _require(fine: bool, message: str) -> None:
    if not fine:
        raise RefusedError("invalid_sampling", message)


def _require_within(name: str, value: float, low: float, high: float) -> None:
    # A NaN is in no range.
    _require(low <= value <= high, f"{name} is {value}: must be from {low:g} to {high:g}")


def _require_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    for token in (min(ids), max(ids)) if ids else ():
        _require(
            0 <= token < vocab_size,
            f"{name}: token id {token} is not in the model's vocabulary of {vocab_size}",
        )


def _check_draw(params: SamplingParams) -> None:
    top_k, top_p = params.top_k, params.top_p
    _require_within("temperature", params.temperature, 0, MAX_TEMPERATURE)
    _require(top_k >= 0, f"top_k is {top_k}: must be 0 (off) or more")
    _require(0 < top_p <= 1, f"top_p is {top_p}: must be more than 0 and at most 1")
    _require_within("min_p", params.min_p, 0, 1)


def _check_ends(params: SamplingParams, vocab_size: int) -> None:
    longest, shortest = params.max_tokens, params.min_tokens
    _require(longest >= 1, f"max_tokens is {longest}: must be at least 1")
    _require(
        0 <= shortest <= longest,
        f"min_tokens is {shortest}: must be from 0 to max_tokens, which is {longest}",
    )
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
    _require_within("repetition_penalty", params.repetition_penalty, *REPETITION_PENALTY)
    _require_within("presence_penalty", params.presence_penalty, -2, 2)
    _require_within("frequency_penalty", params.frequency_penalty, -2, 2)
    bias = params.logit_bias
    _require(
        len(bias) <= MAX_LOGIT_BIAS, f"logit_bias: {len(bias)} tokens: at most {MAX_LOGIT_BIAS}"
    )
    _require_ids("logit_bias", list(bias), vocab_size)
    for token, value in bias.items():
        _require_within(f"logit_bias of token {token}", value, -100, 100)
    words = params.bad_words
    _require(len(words) <= MAX_BAD_WORDS, f"bad_words: {len(words)} words: at most {MAX_BAD_WORDS}")
    _require(all(words), "bad_words: a word has no tokens")
    for word in words:
        _require_ids("bad_words", word, vocab_size)
    blocked = len({word[-1] for word in words}.union(params.stop_token_ids))
    _require(
        2 * blocked <= vocab_size,
        f"bad_words and stop_token_ids can block {blocked} of the model's {vocab_size} tokens: "
        "at most half of them",
    )


def _check_outputs(params: SamplingParams) -> None:
    _require_within("n", params.n, 1, MAX_SAMPLES)
    _require(
        params.n == 1 or params.temperature > 0 or params.beams is not None,
        f"n is {params.n} with temperature 0: every text would be the same; ask for one, or give "
        "a temperature or beam_width",
    )
    if params.logprobs is not None:
        _require_within("logprobs", params.logprobs, 0, MAX_LOGPROBS)


def _check_beams(params: SamplingParams, beams: BeamSearch) -> None:
    _require_within("beam_width", beams.width, 1, MAX_BEAMS)
    _require(
        params.n <= beams.width,
        f"n is {params.n} with a beam_width of {beams.width}: must be at most the width",
    )
    _require(
        params.temperature == 0,
        f"temperature is {params.temperature} with beam_width: beam search draws nothing; give 0",
    )
    _require_within("length_penalty", beams.length_penalty, -10, 10)
    changed = {
        "repetition_penalty": params.repetition_penalty != 1,
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "logit_bias": bool(params.logit_bias),
    }
    for name, given in changed.items():
        _require(
            not given,
            f"{name} with beam_width: beams are compared by the model's own log-probabilities; "
            "leave one of them out",
        )

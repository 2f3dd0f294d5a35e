"""The one record of a generation request and the one of a ranking request, with their limits.

The GPU worker fills them from a stored body (`gpu_worker/worker/answers.py`), MessagePack carries them
to the compute process (`gpu_worker/compute/messages.py`), and the engine computes them. Request bodies
(`jobs/lines/bodies.py`), error hints (`jobs/lines/parsing.py`) and the engine's checks
(`gpu_worker/engine/sampling_checks.py`) take their limits from here.

This module imports no other module of Nightjar and no third-party package, so that every room may
import it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, get_args, get_type_hints

MAX_TOKENS_LIMIT = 1_000_000
MAX_TOKEN_ID = 2**31 - 1  # token ids are stored as int32
MAX_DOCUMENTS = 10_000
MAX_STOPS = 16
MAX_STOP_BYTES = 1_024
MAX_STOPS_BYTES = MAX_STOPS * MAX_STOP_BYTES
"""All stops of a request together: each byte costs a row in the automaton."""
MAX_STOP_TOKEN_IDS = 256
MAX_BAD_WORDS = 1_024
MAX_BAD_WORD_BYTES = 256
MAX_BAD_WORD_SEQUENCES = 2 * MAX_BAD_WORDS
"""A bad word becomes two token sequences, with and without a leading space."""
MAX_LOGIT_BIAS = 1_024
BODY_TEMPERATURE = 2.0
"""The highest temperature of a request body, as in OpenAI's API; the engine takes higher ones."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The range of a number.

    above: `low` itself is outside.  low_means: what `low` stands for, such as "off".  off: the
    value that changes nothing, where it is not `low` and worth telling.
    """

    low: float
    high: float
    above: bool = False
    low_means: str = ""
    off: float | None = None

    def holds(self, value: float) -> bool:
        """Whether the value is in the range; a NaN is in no range."""
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def words(self, high: float | None = None) -> str:
        """The range in words, such as "from 0 (off) to 1"; `high` replaces the upper end."""
        low, most = _number(self.low), _number(self.high if high is None else high)
        if self.above:
            return f"above {low} and at most {most}"
        meaning = f" ({self.low_means})" if self.low_means else ""
        neutral = "" if self.off is None else f"; {_number(self.off)} is off"
        return f"from {low}{meaning} to {most}{neutral}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search as transformers does it.

    A sequence's score is the sum of its tokens' log-probabilities over (its length in tokens) **
    length_penalty.  early_stopping: end as soon as `width` sequences are finished.  Without it the
    search ends when no running sequence, at its present length, passes the worst finished one.
    """

    width: Annotated[int, Limit(1, 128)]
    length_penalty: Annotated[float, Limit(-10, 10)] = 1.0
    early_stopping: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a sequence is continued and where it ends.

    temperature 0 takes the best token; top_k 0, top_p 1, min_p 0 and top_a 0 are off.  The draw
    of step s of sample i depends on (seed, i, s) alone.

    repetition_penalty (off: 1) counts the tokens of prompt and answer, presence_penalty and
    frequency_penalty (off: 0) those of the answer.  logit_bias: what is added to the scores of
    token ids.  bad_words: token sequences that the answer never holds; their last token is
    blocked where it would complete one.  The compute process fills them, from the texts of the
    message, because it has the tokenizer.

    stop: byte strings; the answer ends where the first of them begins.  stop_token_ids end the
    answer like a stop and add nothing to it.  min_tokens: before so many tokens no end-of-text or
    stop token is chosen, and a stop string counts only if a later token completes it (as in vLLM).

    n: independent samples of one prompt.  beams: search instead of sampling, and return the n
    best sequences.  logprobs: how many of the best tokens to report at each step, with their
    log-probabilities and that of the token chosen; None reports nothing.
    """

    max_tokens: Annotated[int, Limit(1, MAX_TOKENS_LIMIT)]
    temperature: Annotated[float, Limit(0, 100, low_means="greedy")] = 0.0
    top_k: Annotated[int, Limit(0, MAX_TOKEN_ID, low_means="off")] = 0
    top_p: Annotated[float, Limit(0, 1, above=True)] = 1.0
    min_p: Annotated[float, Limit(0, 1, low_means="off")] = 0.0
    top_a: Annotated[float, Limit(0, 1, low_means="off")] = 0.0
    seed: Annotated[int, Limit(-(2**63), 2**63 - 1)] = 0
    # Far past use, and near enough to 1 that no score overflows.
    repetition_penalty: Annotated[float, Limit(0.01, 100, off=1)] = 1.0
    presence_penalty: Annotated[float, Limit(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Limit(-2, 2)] = 0.0
    logit_bias: Annotated[Mapping[int, float], Limit(-100, 100)] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop: tuple[bytes, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: Annotated[int, Limit(0, MAX_TOKENS_LIMIT)] = 0
    ignore_eos: bool = False
    n: Annotated[int, Limit(1, 128)] = 1
    beams: BeamSearch | None = None
    logprobs: Annotated[int | None, Limit(0, 20)] = None

    @property
    def width(self) -> int:
        """How many sequences of the request may run at once."""
        return self.n if self.beams is None else self.beams.width


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Continue a prompt.  An id at or past the vocabulary V means row `id - V` of the request's
    prompt vectors, here and in RankRequest.

    urgent: a client waits for the answer, so the request goes before others; adapter: the key of
    the LoRA adapter that it is computed with; in both records.
    """

    request_id: int
    token_ids: Sequence[int]
    sampling: SamplingParams
    prompt_vectors: str | None = None
    urgent: bool = False
    adapter: str | None = None


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
    urgent: bool = False
    adapter: str | None = None


Request = GenerateRequest | RankRequest


class _Asked(Protocol):
    """What a request body and `SamplingParams` both say of how a sequence is drawn."""

    @property
    def max_tokens(self) -> int: ...

    @property
    def min_tokens(self) -> int: ...

    @property
    def n(self) -> int: ...

    @property
    def temperature(self) -> float: ...

    @property
    def repetition_penalty(self) -> float: ...

    @property
    def presence_penalty(self) -> float: ...

    @property
    def frequency_penalty(self) -> float: ...

    @property
    def logit_bias(self) -> Mapping[Any, float]: ...


def contradictions(asked: _Asked, beam_width: int | None) -> Iterator[tuple[str, str]]:
    """Yield each field that contradicts another one, and in words what is wrong with it."""
    if asked.min_tokens > asked.max_tokens:
        yield "min_tokens", f"is {asked.min_tokens}, more than max_tokens, which is {asked.max_tokens}"
    if beam_width is None:
        if asked.n > 1 and asked.temperature == 0:
            yield (
                "n",
                f"is {asked.n} with temperature 0, where every text is the same; give a "
                "temperature or a beam_width, or leave n out",
            )
        return
    if asked.n > beam_width:
        yield "n", f"is {asked.n}, more than the {beam_width} beams; raise beam_width"
    changed = {
        "temperature": asked.temperature > 0,
        "repetition_penalty": asked.repetition_penalty != 1,
        "presence_penalty": asked.presence_penalty != 0,
        "frequency_penalty": asked.frequency_penalty != 0,
        "logit_bias": bool(asked.logit_bias),
    }
    for field_ in (name for name, differs in changed.items() if differs):
        yield (
            field_,
            "cannot be combined with beam_width: beams are compared by the model's own "
            "log-probabilities; leave one of them out",
        )


def _limits(record: type[Any]) -> dict[str, Limit]:
    """The limits in a record's annotations, by field."""
    hints = get_type_hints(record, vars(sys.modules[__name__]), include_extras=True)
    return {
        name: limit
        for name, hint in hints.items()
        for limit in get_args(hint)[1:]
        if isinstance(limit, Limit)
    }


LIMITS: Mapping[str, Limit] = {
    **_limits(SamplingParams),
    **{
        "beam_width" if name == "width" else name: limit
        for name, limit in _limits(BeamSearch).items()
    },
}
"""By the name of the field in a request body."""

# Fields that a request body writes as the record does.
SAME_IN_BODY: tuple[str, ...] = tuple(
    one.name
    for one in dataclasses.fields(SamplingParams)
    if one.name not in {"seed", "logit_bias", "bad_words", "stop", "stop_token_ids", "beams"}
)

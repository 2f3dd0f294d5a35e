"""An engine without a model: it makes answers up, to test and time everything around it.

`nightjar worker compute --engine fake` starts it. The model's tokenizer is still read, but not its
weights. An answer depends on its request only: token ids, keys of what it names, seed and
lengths. So a request that is computed twice gets the same answer, in every batch. Stop strings,
penalties and biases change nothing.

A request whose prompt holds a poison marker does the following when it is computed:

- `<poison:raise>`: raises an exception; only this request fails;
- `<poison:crash>`: ends the process by SIGSEGV, as a fault in a kernel does;
- `<poison:hang>`: never ends its step, as in a deadlock;
- `<poison:memory>`: takes `MEMORY_BYTES`, then ends the process by SIGKILL, as the system does when
  memory is short.
"""

import os
import signal
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from hashlib import shake_128
from itertools import islice
from typing import TYPE_CHECKING

from nightjar.gpu_worker.engine import (
    GenerateOutput,
    GenerateRequest,
    GenerateResult,
    RankRequest,
    RankResult,
    Request,
    RequestFailed,
    Result,
    TokenLogprobs,
)
from nightjar.gpu_worker.engine.statistics import EngineCounters, EngineGauges, EngineStatistics

if TYPE_CHECKING:
    from torch import Tensor

POISON = b"<poison:"
MEMORY_BYTES = 512 << 20
_CHUNK_BYTES = 16 << 20
_WORST_NLL = 16.0  # nats


class PoisonError(Exception):
    """Raised by `<poison:raise>`."""


class FakeEngine:
    """Has the interface of `Engine`, without a model.

    Args:
        token_bytes: The raw bytes of each token id, b"" for special tokens.
        step_s: Seconds that each step takes, whatever it computes.
        step_requests: Most requests that end in one step: urgent ones first, then the oldest.

    Raises:
        ValueError: No token is readable text by itself, so no answer can be made.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], *, step_s: float = 0.0, step_requests: int = 256
    ) -> None:
        self._token_bytes = token_bytes
        self._bytes_of = dict(enumerate(token_bytes))
        # Tokens with a marker's first byte. Most requests hold none, and are not searched.
        self._may_be_poison = {token for token, raw in enumerate(token_bytes) if POISON[:1] in raw}
        self._words = [token for token, raw in enumerate(token_bytes) if _is_text(raw)]
        if not self._words:
            raise ValueError("no token of the vocabulary is a text by itself")
        self._step_s = step_s
        self._step_requests = step_requests
        self._waiting: dict[int, Request] = {}
        self._cancelled: set[int] = set()
        self._urgent = False  # whether an urgent request may wait
        self._vectors: set[str] = set()
        self._adapters: set[str] = set()
        self._counters = EngineCounters()

    def register_prompt_vectors(self, key: str, vectors: "Tensor") -> None:
        """Register a key of prompt vectors; the vectors [n, H] change no answer."""
        self._vectors.add(key)

    def register_adapter(self, key: str, factors: Mapping[str, "Tensor"]) -> None:
        """Register a key of a LoRA adapter; only the key changes answers."""
        self._adapters.add(key)

    def forget(self, key: str) -> None:
        """Drop a key of prompt vectors or of an adapter."""
        self._vectors.discard(key)
        self._adapters.discard(key)

    def submit(self, request: Request) -> None:
        """Add a request; one of the next steps answers it."""
        self._waiting[request.request_id] = request
        self._urgent = self._urgent or request.urgent

    def cancel(self, request_id: int) -> None:
        """Drop a request at the next step, with the result `cancelled`; ignore unknown ids."""
        self._cancelled.add(request_id)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._cancelled)

    def statistics(self) -> EngineStatistics:
        """Return the tokens of the prompts and answers so far; there is no cache."""
        counters = EngineCounters().plus(self._counters)  # a copy
        gauges = EngineGauges(waiting=len(self._waiting), slots=self._step_requests)
        return EngineStatistics(counters, gauges)

    def step(self) -> list[Result]:
        """Sleep as long as a step takes; return the results of the requests that it ended."""
        results: list[Result] = []
        for request_id in self._cancelled & self._waiting.keys():
            del self._waiting[request_id]
            results.append(RequestFailed(request_id, "cancelled", "the request was cancelled"))
        self._cancelled.clear()
        if self._waiting and self._step_s:
            time.sleep(self._step_s)
        for request_id in list(islice(self._in_order(), self._step_requests)):
            results.append(self._compute(self._waiting.pop(request_id)))
        self._urgent = self._urgent and any(one.urgent for one in self._waiting.values())
        return results

    def _in_order(self) -> Iterable[int]:
        """Return the waiting requests' ids: urgent ones first, then by arrival."""
        if not self._urgent:
            return self._waiting
        return sorted(self._waiting, key=lambda id_: not self._waiting[id_].urgent)

    def _compute(self, request: Request) -> Result:
        try:
            if isinstance(request, GenerateRequest):
                return self._generate(request)
            return self._rank(request)
        except PoisonError as error:
            return RequestFailed(request.request_id, "internal_error", f"PoisonError: {error}")
        except (TypeError, ValueError, OverflowError, struct.error) as error:
            message = f"{type(error).__name__}: {error}"
            return RequestFailed(request.request_id, "invalid_request", message)

    def _generate(self, request: GenerateRequest) -> Result:
        self._swallow(request.token_ids)
        if refusal := self._refusal(request):
            return refusal
        outputs = [self._text(request, sample) for sample in range(request.sampling.n)]
        self._counters.prefill_tokens += len(request.token_ids)
        self._counters.decode_tokens += sum(len(output.token_ids) for output in outputs)
        return GenerateResult(request.request_id, outputs, len(request.token_ids))

    def _text(self, request: GenerateRequest, sample: int) -> GenerateOutput:
        """Make one sample, of one token to `max_tokens`."""
        asked = request.sampling
        seed = asked.seed.to_bytes(16, "little", signed=True) + sample.to_bytes(4, "little")
        drawn = _draw([request.token_ids], _named(request), seed, 1 + asked.max_tokens)
        shortest = asked.max_tokens if asked.ignore_eos else max(1, asked.min_tokens)
        length = shortest + drawn[0] % (asked.max_tokens - shortest + 1)
        ids = [self._words[number % len(self._words)] for number in drawn[1 : 1 + length]]
        logprobs = None
        if asked.logprobs is not None:
            logprobs = [
                _logprobs(token, number) for token, number in zip(ids, drawn[1:], strict=False)
            ]
        return GenerateOutput(
            token_ids=ids,
            text=b"".join(self._token_bytes[token] for token in ids),
            finish_reason="length" if length == asked.max_tokens else "eos",
            logprobs=logprobs,
        )

    def _rank(self, request: RankRequest) -> Result:
        for ids in (request.query_ids, *request.documents):
            self._swallow(ids)
        if refusal := self._refusal(request):
            return refusal
        scores: list[float | None] = []
        for document in request.documents:
            segments = (request.query_ids, document)
            scores.append(_nll(_draw(segments, _named(request), b"", 1)[0]))
        self._counters.documents += len(scores)
        self._counters.rank_tokens += len(request.query_ids) + sum(map(len, request.documents))
        counts = [sum(token < len(self._token_bytes) for token in d) for d in request.documents]
        return RankResult(request.request_id, scores, counts, len(request.query_ids))

    def _refusal(self, request: Request) -> RequestFailed | None:
        for code, what, key, known in (
            ("prompt_vectors", "prompt vectors", request.prompt_vectors, self._vectors),
            ("adapter", "LoRA adapter", request.adapter, self._adapters),
        ):
            if key is not None and key not in known:
                message = f"{what} {key!r}: not registered"
                return RequestFailed(request.request_id, f"unknown_{code}", message)
        return None

    def _swallow(self, ids: Sequence[int]) -> None:
        """Do what a poison marker in the prompt says."""
        if self._may_be_poison.isdisjoint(ids):
            return
        text = b"".join([self._bytes_of.get(token, b"") for token in ids])
        if POISON not in text:
            return
        if b"<poison:raise>" in text:
            raise PoisonError("the request's text asked for it")
        if b"<poison:crash>" in text:
            os.kill(os.getpid(), signal.SIGSEGV)
        if b"<poison:memory>" in text:
            taken = []
            for _ in range(MEMORY_BYTES // _CHUNK_BYTES):
                taken.append(b"\xff" * _CHUNK_BYTES)  # written to, so that it is really taken
            os.kill(os.getpid(), signal.SIGKILL)
        while b"<poison:hang>" in text:
            time.sleep(1)


def _is_text(raw: bytes) -> bool:
    """Return whether a token's bytes are printable characters."""
    try:
        return raw.decode().isprintable() and bool(raw)
    except UnicodeDecodeError:
        return False


def _named(request: Request) -> str:
    """Return the keys that a request names; an adapter's follows a character that none holds."""
    vectors = request.prompt_vectors or ""
    return vectors if request.adapter is None else f"{vectors}\0{request.adapter}"


def _draw(segments: Iterable[Sequence[int]], named: str, seed: bytes, count: int) -> Sequence[int]:
    """Return `count` numbers in [0, 2**32), a hash of everything that an answer depends on."""
    digest = shake_128(seed)
    digest.update(named.encode())
    for ids in segments:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(struct.pack(f"={len(ids)}i", *ids))
    return memoryview(digest.digest(4 * count)).cast("I")


def _nll(number: int) -> float:
    """Return a negative log-likelihood (nats) in [0, _WORST_NLL)."""
    return number / 2**32 * _WORST_NLL


def _logprobs(token: int, number: int) -> TokenLogprobs:
    """Report only the token itself, whatever number of alternatives was asked for."""
    chosen = -_nll(number)
    return TokenLogprobs(chosen, ((token, chosen),))

"""The messages between the GPU worker and its compute process.

A frame is a list of typed messages in MessagePack; pickle is never used. `ticket` is the number
that the launcher gives to each request, unique in the life of one compute process. The request's
record carries it as its `request_id`.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from nightjar.gpu_worker.engine.statistics import EngineStatistics
from nightjar.requests import GenerateRequest, RankRequest


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Generate an answer to one prompt.

    bad_words: As texts, because only the compute process has the tokenizer. The field of the
        request's record is empty.
    """

    request: GenerateRequest
    bad_words: list[str] = []

    @property
    def ticket(self) -> int:
        """The number that the launcher knows the request by."""
        return self.request.request_id


class Rank(msgspec.Struct, frozen=True, tag=True):
    """Score documents after a query."""

    request: RankRequest

    @property
    def ticket(self) -> int:
        """The number that the launcher knows the request by."""
        return self.request.request_id


class RegisterVectors(msgspec.Struct, frozen=True, tag=True):
    """Make prompt vectors or a LoRA adapter known under a key.

    `data` is a safetensors file of what `kind` says: prompt vectors, one tensor, or the factors of
    an adapter.
    """

    key: str
    data: bytes
    kind: Literal["vectors", "lora"]


class ForgetVectors(msgspec.Struct, frozen=True, tag=True):
    """Drop prompt vectors or an adapter; requests that run keep theirs."""

    key: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop computing these requests at the next step; their answers are not waited for."""

    tickets: list[int]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; sent once.

    dtype: The precision of the computation, never "auto".
    """

    model: str
    dtype: str
    load_s: float


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be served; the process ends."""

    message: str


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """A sign of life: the steps of the engine so far, and the seconds spent in them."""

    steps: int
    busy_s: float


class Statistics(msgspec.Struct, frozen=True, tag=True):
    """What the engine has counted since its start; sent at most once a second."""

    statistics: EngineStatistics


class TokenReport(msgspec.Struct, frozen=True):
    """One generated token.

    token: Its bytes, or a special token's name.
    begin: Offset of its first byte in the text.
    logprob: Of the token (nats).
    top: The best tokens of that step with their log-probabilities, best first.
    """

    token: bytes
    begin: int
    logprob: float
    top: list[tuple[bytes, float]]


class Output(msgspec.Struct, frozen=True):
    """One text of an answer; `text` is cut where the stop begins."""

    text: bytes
    completion_tokens: int
    finish_reason: str
    reports: list[TokenReport] | None = None


class Generated(msgspec.Struct, frozen=True, tag=True):
    """The answer to Generate: its samples in order, or its beams, best first.

    recomputed_in: The higher precision of a second computation, made because the model's own
        precision gave scores that are not finite; None without one. The same in Ranked.
    cached_tokens: Of the prompt or the query, those that the prefix cache held.
    """

    ticket: int
    outputs: list[Output]
    recomputed_in: str | None = None
    cached_tokens: int = 0


class Ranked(msgspec.Struct, frozen=True, tag=True):
    """The answer to Rank: mean negative log-likelihood (nats) and tokens of each document.

    mean_nll: None for a document that cannot be among the best `top_n`.
    pruned_tokens: Tokens of such documents that were not scored.
    """

    ticket: int
    mean_nll: list[float | None]
    token_counts: list[int]
    recomputed_in: str | None = None
    cached_tokens: int = 0
    pruned_tokens: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This request cannot be computed; its neighbours go on."""

    ticket: int
    code: str
    message: str


ToCompute = Generate | Rank | RegisterVectors | ForgetVectors | Cancel
Answer = Generated | Ranked | Failed
FromCompute = Ready | LoadFailed | Stepped | Statistics | Generated | Ranked | Failed

_encoder = msgspec.msgpack.Encoder()
_to_compute = msgspec.msgpack.Decoder(list[ToCompute])
_from_compute = msgspec.msgpack.Decoder(list[FromCompute])


def encode(messages: Sequence[ToCompute | FromCompute]) -> bytes:
    """Encode one frame."""
    return _encoder.encode(messages)


def decode_to_compute(frame: bytes) -> list[ToCompute]:
    """Decode one frame from the worker."""
    return _to_compute.decode(frame)


def decode_from_compute(frame: bytes) -> list[FromCompute]:
    """Decode one frame from the compute process."""
    return _from_compute.decode(frame)

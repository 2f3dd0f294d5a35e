"""What the Celery worker and its compute process say to each other.

Typed, encoded as MessagePack, one list of messages a frame; never pickle. `ticket` is a
number that the launcher gives each request it sends, unique in the life of one compute process.
"""

from collections.abc import Sequence

import msgspec


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Generate an answer to one prompt."""

    ticket: int
    token_ids: list[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: list[bytes]
    ignore_eos: bool
    prompt_vectors: str | None = None


class Rank(msgspec.Struct, frozen=True, tag=True):
    """Score documents after a query."""

    ticket: int
    query_ids: list[int]
    documents: list[list[int]]
    prompt_vectors: str | None = None


class RegisterVectors(msgspec.Struct, frozen=True, tag=True):
    """Make prompt vectors known under a key; `data` is a safetensors file with one tensor."""

    key: str
    data: bytes


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop computing these requests at the next step; their answers are not waited for."""

    tickets: list[int]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; sent once.  dtype: what it is computed in, never "auto"."""

    model: str
    dtype: str
    load_s: float


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be served; the process ends."""

    message: str


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """A sign of life: steps that the engine has done, and the seconds it spent in them."""

    steps: int
    busy_s: float


class Generated(msgspec.Struct, frozen=True, tag=True):
    """The answer to Generate; `text` is cut where the stop begins."""

    ticket: int
    text: bytes
    completion_tokens: int
    finish_reason: str


class Ranked(msgspec.Struct, frozen=True, tag=True):
    """The answer to Rank: mean negative log-likelihood (nats) and tokens of each document."""

    ticket: int
    mean_nll: list[float]
    token_counts: list[int]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """This request cannot be computed; its neighbours go on."""

    ticket: int
    code: str
    message: str


ToCompute = Generate | Rank | RegisterVectors | Cancel
Answer = Generated | Ranked | Failed
FromCompute = Ready | LoadFailed | Stepped | Generated | Ranked | Failed

_encoder = msgspec.msgpack.Encoder()
_to_compute = msgspec.msgpack.Decoder(list[ToCompute])
_from_compute = msgspec.msgpack.Decoder(list[FromCompute])


def encode(messages: Sequence[ToCompute | FromCompute]) -> bytes:
    """One frame."""
    return _encoder.encode(messages)


def decode_to_compute(frame: bytes) -> list[ToCompute]:
    """Messages of one frame from the worker."""
    return _to_compute.decode(frame)


def decode_from_compute(frame: bytes) -> list[FromCompute]:
    """Messages of one frame from the compute process."""
    return _from_compute.decode(frame)

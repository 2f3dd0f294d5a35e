"""What the Celery worker and its compute process say to each other.

Typed, encoded as MessagePack, one list of messages a frame; never pickle. `ticket` is a number
that the launcher gives each request it sends, unique in the life of one compute process. It is the
`request_id` of the request's record.
"""

from collections.abc import Sequence

import msgspec

from nightjar.requests import GenerateRequest, RankRequest


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Generate an answer to one prompt.

    bad_words: still as texts, because only the compute process has the tokenizer; the request's
    own are empty.
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


class TokenReport(msgspec.Struct, frozen=True):
    """One generated token.

    token: its bytes, or those of a special token's name; begin: the byte of the text where it
    begins; logprob: of the token (nats); top: the best tokens of that step with theirs, in order.
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
    """The answer to Generate: its samples in order, or its beams from the best down.

    recomputed_in: the higher precision that it was computed in again, because the model's own
    gave scores that are not finite; here and in Ranked.
    """

    ticket: int
    outputs: list[Output]
    recomputed_in: str | None = None


class Ranked(msgspec.Struct, frozen=True, tag=True):
    """The answer to Rank: mean negative log-likelihood (nats) and tokens of each document; no
    likelihood where the document cannot be among the best `top_n`."""

    ticket: int
    mean_nll: list[float | None]
    token_counts: list[int]
    recomputed_in: str | None = None


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

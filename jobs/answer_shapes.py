"""What the body of an answer holds, as types: GPU workers write it, and the API describes it."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict

FinishReason = Literal["stop", "length"]


class CallUsage(TypedDict):
    """Tokens of a call; `saved_tokens` were asked for and not needed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    requested_tokens: NotRequired[int]
    saved_tokens: NotRequired[int]


class ReceiptVector(TypedDict):
    """Prompt vectors or an adapter: the name with the version, and the SHA-256 of the file."""

    name: str
    sha256: str


class Receipt(TypedDict):
    """What an answer was computed with.

    model: fingerprint of its files; tokenizer: SHA-256 of its tokenizer.json; precision: with the
    precision plan; version: of Nightjar.
    """

    model: str
    tokenizer: str
    precision: str
    version: str
    seed: NotRequired[int]
    prompt_vector: NotRequired[ReceiptVector]
    adapter: NotRequired[ReceiptVector]


class CallAnswer(TypedDict):
    """The answer to a call; `recomputed_in` is a higher precision that it needed."""

    id: str
    created: int
    model: str
    precision: str
    usage: CallUsage
    recomputed_in: NotRequired[str]
    reused: NotRequired[str]
    receipt: NotRequired[Receipt]


class TextLogprobs(TypedDict):
    """Log-probabilities of a completion: four lists with an entry for each generated token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(TypedDict):
    """One text of a completion."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class Completion(CallAnswer):
    """An answer of OpenAI's completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatMessage(TypedDict):
    """What the model says."""

    role: Literal["assistant"]
    content: str


class ChatLogprob(TypedDict):
    """A token and its log-probability; `bytes` is the token in UTF-8, or a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(ChatLogprob):
    """A generated token, and the most likely ones in its place."""

    top_logprobs: list[ChatLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat's answer."""

    content: list[ChatToken]


class ChatChoice(TypedDict):
    """One answer to a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(CallAnswer):
    """An answer of OpenAI's chat completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class DocumentText(TypedDict):
    """A document of a ranking."""

    text: str


class RankedDocument(TypedDict):
    """A document with its score, from 0 to 1; `index` is its place in the request."""

    index: int
    relevance_score: float
    mean_nll: float
    token_count: int
    document: NotRequired[DocumentText]

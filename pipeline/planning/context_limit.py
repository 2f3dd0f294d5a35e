"""Checks that a request fits into the model's context, first by its bytes, then by its tokens."""

from collections.abc import Sequence

from nightjar.checkpoints import PROMPT_TOKEN
from nightjar.checkpoints.long_texts import PIECE_CHARACTERS
from nightjar.jobs.records import QueuedRequest, RequestError
from nightjar.jobs.states import RequestKind


class EncodeError(Exception):
    """This model cannot compute the request."""

    def __init__(self, code: str, message: str, param: str) -> None:
        super().__init__(message)
        self.error = RequestError(code=code, message=message, param=param)


class ContextLimit:
    """Refuses requests that are empty or do not fit into the model's context.

    Args:
        length: The context in tokens.
        most_bytes: The most bytes of text that one token stands for; None if unknown.
    """

    def __init__(self, length: int, most_bytes: int | None) -> None:
        self._length = length
        self._most_bytes = None if most_bytes is None else max(most_bytes, len(PROMPT_TOKEN))

    def check_bytes(self, request: QueuedRequest, texts: Sequence[str]) -> None:
        """Refuse texts that are too long for the context by their bytes; called before tokenizing.

        Raises:
            EncodeError: The texts do not fit.
        """
        context = self._length
        if self._most_bytes is None or not texts:
            return
        first, *documents = (_fewest_tokens(text, self._most_bytes) for text in texts)
        at_least = first + max(documents, default=0)
        if at_least <= context:
            return
        index = documents.index(max(documents)) + 1 if documents else 0
        field = field_of(request, index)
        what = f"the query and {field} have" if index else "the prompt has"
        raise EncodeError(
            "context_length_exceeded",
            f"{what} at least {at_least} tokens, by the length in bytes, past the model's "
            f"context of {context}; shorten the text",
            field,
        )

    def check_tokens(self, request: QueuedRequest, segments: list[list[int]]) -> None:
        """Refuse a request whose token ids do not fit.

        Raises:
            EncodeError: A segment has no token, or the request does not fit.
        """
        if not all(segments):
            field = field_of(request, segments.index([]))
            raise EncodeError("invalid_value", f"{field} gives no token; it is empty", field)
        if request.kind is RequestKind.GENERATE:
            self._check_generation(request, len(segments[0]), int(request.body["max_tokens"]))
            return
        query, *documents = map(len, segments)
        for index, length in enumerate(documents, start=1):
            if query + length > self._length:
                field = field_of(request, index)
                about = "at least " if _is_long(request) else ""
                raise EncodeError(
                    "context_length_exceeded",
                    f"the query has {about}{query} tokens and {field} {about}{length}: together "
                    f"{about}{query + length}, past the model's context of "
                    f"{self._length}; shorten one of them",
                    field,
                )

    def _check_generation(self, request: QueuedRequest, prompt: int, max_tokens: int) -> None:
        context = self._length
        if prompt >= context:
            about = "at least " if _is_long(request) else ""
            raise EncodeError(
                "context_length_exceeded",
                f"the prompt has {about}{prompt} tokens; the model's context of {context} leaves "
                "no room for an answer; shorten the prompt",
                field_of(request, 0),
            )
        if prompt + max_tokens > context:
            raise EncodeError(
                "context_length_exceeded",
                f"the prompt has {prompt} tokens and max_tokens is {max_tokens}: together "
                f"{prompt + max_tokens}, past the model's context of {context}; ask for at most "
                f"{context - prompt}",
                "body.max_tokens",
            )


def _fewest_tokens(text: str, most_bytes: int) -> int:
    """Return the least number of tokens that the text can have."""
    return -(-len(text.encode()) // most_bytes)


def _is_long(request: QueuedRequest) -> bool:
    """Whether counting its tokens may have stopped before the end of its text."""
    return request.size > PIECE_CHARACTERS


def is_chat(request: QueuedRequest) -> bool:
    """Whether the prompt is a list of messages."""
    return "messages" in request.body


def field_of(request: QueuedRequest, segment: int) -> str:
    """Return the name of the field that a segment comes from."""
    if segment:
        return f"body.documents[{segment - 1}]"
    if request.kind is RequestKind.RANK:
        return "body.query"
    return "body.messages" if is_chat(request) else "body.prompt"

"""Encode: from a request's text to token ids, with every limit of the model checked.

A query and its documents are tokenized apart and joined, so that a document's score does not
depend on a merge across the border.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from nightjar.checkpoints import (
    PROMPT_TOKEN,
    ChatTemplate,
    ChatTemplateError,
    ModelConfig,
    Tokenizer,
)
from nightjar.jobs.records import (
    EncodedRequest,
    PromptVector,
    QueuedRequest,
    RequestError,
    RequestKind,
)

VectorLookup = Callable[[str], PromptVector | None]


class EncodeError(Exception):
    """A request that cannot be computed by this model."""

    def __init__(self, code: str, message: str, param: str) -> None:
        super().__init__(message)
        self.error = RequestError(code=code, message=message, param=param)


class Encoder:
    """Turns queued requests into token ids for one model.

    Args:
        config: Sizes of the model; its context length bounds every request.
        tokenizer: The model's own tokenizer.
        find_vectors: Looks a prompt vector up by name; None where the name is unknown.
        served_name: Name that a request's `model` has to match; None accepts any.
        chat_template: Makes a prompt of messages; None where the model has none.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        find_vectors: VectorLookup,
        served_name: str | None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._find_vectors = find_vectors
        self._served_name = served_name
        self._chat_template = chat_template
        self._prompt_id = tokenizer.token_id(PROMPT_TOKEN)
        self._prefix = list(tokenizer.prefix_ids)
        bound = tokenizer.most_bytes
        self._most_bytes = None if bound is None else max(bound, len(PROMPT_TOKEN))

    def encode(
        self, requests: Sequence[QueuedRequest]
    ) -> tuple[list[EncodedRequest], list[tuple[int, RequestError]]]:
        """Encode requests together; return those that fit and `(request id, error)` of the rest."""
        find = cache(self._find_vectors)  # once a name in this call, not once a request
        rejected: list[tuple[int, RequestError]] = []
        texts: list[tuple[QueuedRequest, list[str]]] = []
        for request in requests:
            try:
                given = self._texts(request)
                self._check_bytes(request, given)
                texts.append((request, given))
            except EncodeError as error:
                rejected.append((request.id, error.error))
        pieces = [text.split(PROMPT_TOKEN) for _, group in texts for text in group]
        ids = iter(self._tokenizer.encode_batch([piece for group in pieces for piece in group]))
        pieces_of = iter(pieces)
        encoded: list[EncodedRequest] = []
        for request, group in texts:
            # Take this request's pieces off the iterators before anything can be refused.
            split = [[next(ids) for _ in next(pieces_of)] for _ in group]
            try:
                encoded.append(self._assemble(request, split, find))
            except EncodeError as error:
                rejected.append((request.id, error.error))
        return encoded, rejected

    def _texts(self, request: QueuedRequest) -> list[str]:
        """The texts to tokenize, in segment order; none for a prompt given as token ids."""
        body = request.body
        self._check_model(body)
        if request.kind is RequestKind.RANK:
            return [body["query"], *body["documents"]]
        if _is_chat(request):
            return [self._render(body["messages"], body["chat_template_kwargs"])]
        return [body["prompt"]] if isinstance(body["prompt"], str) else []

    def _check_bytes(self, request: QueuedRequest, texts: Sequence[str]) -> None:
        """Refuse what is too long whatever its tokens are, before it is tokenized."""
        context = self._config.context_length
        if self._most_bytes is None or not texts:
            return
        first, *documents = (_fewest_tokens(text, self._most_bytes) for text in texts)
        at_least = first + max(documents, default=0)
        if at_least <= context:
            return
        place = documents.index(max(documents)) + 1 if documents else 0
        field = _field(request, place)
        what = f"the query and {field} have" if place else "the prompt has"
        raise EncodeError(
            "context_length_exceeded",
            f"{what} at least {at_least} tokens, by the length in bytes, past the model's "
            f"context of {context}; shorten the text",
            field,
        )

    def _render(self, messages: Sequence[dict[str, str]], variables: dict[str, Any]) -> str:
        """The prompt that the model's template makes of messages."""
        if self._chat_template is None:
            raise EncodeError(
                "unsupported",
                "this model has no chat template; send the prompt to /v1/completions",
                "body.messages",
            )
        try:
            return self._chat_template.render(messages, variables=variables)
        except ChatTemplateError as error:
            raise EncodeError("invalid_value", str(error), "body.messages") from error

    def _assemble(
        self, request: QueuedRequest, split: Sequence[list[list[int]]], find: VectorLookup
    ) -> EncodedRequest:
        if split:
            # Where the tokenizer knows the prompt token, splitting on it gives the same pieces.
            segments = [_join(pieces) for pieces in split]
            placeholders = sum(map(len, split)) - len(split)
            if not _is_chat(request):  # a chat template writes out what it begins with
                segments[0] = self._with_prefix(segments[0])
        else:
            segments = [self._check_ids(request.body["prompt"])]
            placeholders = segments[0].count(_PLACEHOLDER)
        vectors = self._vectors(request.body, find)
        if vectors is None:
            if placeholders:
                raise EncodeError(
                    "missing_field",
                    f"the text holds {PROMPT_TOKEN} but the body names no prompt_vector; "
                    "name one, or take the token out",
                    "body.prompt_vector",
                )
        else:
            segments = self._place_vectors(segments, vectors, placeholders)
        self._check_lengths(request, segments)
        return EncodedRequest(
            id=request.id,
            segments=segments,
            prompt_vector=None if vectors is None else f"{vectors.name}@{vectors.version}",
        )

    def _with_prefix(self, ids: list[int]) -> list[int]:
        """Put before a text what the model expects there (Llama's begin-of-text token), unless the
        text has written it out.  Prompts given as token ids are taken as they are."""
        prefix = self._prefix
        return ids if not ids or ids[: len(prefix)] == prefix else prefix + ids

    def _check_model(self, body: dict[str, Any]) -> None:
        asked = body.get("model")
        if self._served_name is not None and asked not in (None, self._served_name):
            raise EncodeError(
                "model_not_found",
                f"the model served here is {self._served_name!r}, not {str(asked)[:80]!r}; leave "
                "`model` out or name the served one; --accept-any-model (in a queue "
                "NIGHTJAR_ACCEPT_ANY_MODEL) computes whatever name is given",
                "body.model",
            )

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        vocabulary = self._config.vocab_size
        for place, token_id in enumerate(ids):
            if not 0 <= token_id < vocabulary:
                raise EncodeError(
                    "invalid_value",
                    f"prompt[{place}] is {token_id}; token ids of this model are 0 to "
                    f"{vocabulary - 1}",
                    f"body.prompt[{place}]",
                )
        return [_PLACEHOLDER if token_id == self._prompt_id else token_id for token_id in ids]

    def _vectors(self, body: dict[str, Any], find: VectorLookup) -> PromptVector | None:
        name = body.get("prompt_vector")
        if name is None:
            return None
        vectors = find(name)
        if vectors is None:
            raise EncodeError(
                "prompt_vector_not_found",
                f"no prompt vector is registered under the name {name[:80]!r}",
                "body.prompt_vector",
            )
        if vectors.width != self._config.hidden_size:
            raise EncodeError(
                "invalid_value",
                f"the prompt vector {name[:80]!r} is {vectors.width} wide; this model needs "
                f"{self._config.hidden_size}",
                "body.prompt_vector",
            )
        return vectors

    def _place_vectors(
        self, segments: list[list[int]], vectors: PromptVector, placeholders: int
    ) -> list[list[int]]:
        """Replace placeholders by ids past the vocabulary, one for each row of the vectors.

        The k-th placeholder reads row k; a single one stands for all rows in a row.
        """
        first = self._config.vocab_size
        rows = iter(range(first, first + vectors.length))
        if placeholders not in (1, vectors.length):
            raise EncodeError(
                "invalid_value",
                f"the text holds {PROMPT_TOKEN} {placeholders} times; the prompt vector "
                f"{vectors.name!r} has {vectors.length} rows: write it once for all of them, "
                f"or {vectors.length} times",
                "body.prompt_vector",
            )
        placed = []
        for ids in segments:
            out: list[int] = []
            for token_id in ids:
                if token_id != _PLACEHOLDER:
                    out.append(token_id)
                elif placeholders == 1:
                    out.extend(rows)
                else:
                    out.append(next(rows))
            placed.append(out)
        return placed

    def _check_lengths(self, request: QueuedRequest, segments: list[list[int]]) -> None:
        if not all(segments):
            field = _field(request, segments.index([]))
            raise EncodeError("invalid_value", f"{field} gives no token; it is empty", field)
        if request.kind is RequestKind.GENERATE:
            self._check_generation(request, len(segments[0]), int(request.body["max_tokens"]))
            return
        query, *documents = map(len, segments)
        for place, length in enumerate(documents, start=1):
            if query + length > self._config.context_length:
                field = _field(request, place)
                raise EncodeError(
                    "context_length_exceeded",
                    f"the query has {query} tokens and {field} {length}: together "
                    f"{query + length}, past the model's context of "
                    f"{self._config.context_length}; shorten one of them",
                    field,
                )

    def _check_generation(self, request: QueuedRequest, prompt: int, max_tokens: int) -> None:
        context = self._config.context_length
        if prompt >= context:
            raise EncodeError(
                "context_length_exceeded",
                f"the prompt has {prompt} tokens; the model's context of {context} leaves no "
                "place for an answer; shorten the prompt",
                _field(request, 0),
            )
        if prompt + max_tokens > context:
            raise EncodeError(
                "context_length_exceeded",
                f"the prompt has {prompt} tokens and max_tokens is {max_tokens}: together "
                f"{prompt + max_tokens}, past the model's context of {context}; ask for at most "
                f"{context - prompt}",
                "body.max_tokens",
            )


# Stands for <|PROMPT|> until the vectors' rows are known; no tokenizer gives it.
_PLACEHOLDER = -1


def _fewest_tokens(text: str, most_bytes: int) -> int:
    """So many tokens a text has at least."""
    return -(-len(text.encode()) // most_bytes)


def _join(pieces: list[list[int]]) -> list[int]:
    ids, *others = pieces
    for piece in others:
        ids.append(_PLACEHOLDER)
        ids.extend(piece)
    return ids


def _is_chat(request: QueuedRequest) -> bool:
    """Whether a text is asked for by messages."""
    return "messages" in request.body


def _field(request: QueuedRequest, segment: int) -> str:
    """The field that a segment comes from."""
    if segment:
        return f"body.documents[{segment - 1}]"
    if request.kind is RequestKind.RANK:
        return "body.query"
    return "body.messages" if _is_chat(request) else "body.prompt"

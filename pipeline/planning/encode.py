"""Encode: turn a request's text into token ids and check every limit of the model.

A query and its documents are tokenized separately and joined. So no token spans the border between
them, and a document's score does not depend on such a token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nightjar.checkpoints import (
    PROMPT_TOKEN,
    ChatTemplate,
    ChatTemplateError,
    ModelConfig,
    Tokenizer,
)
from nightjar.jobs.asked import without_texts
from nightjar.jobs.records import EncodedRequest, QueuedRequest, RequestError
from nightjar.jobs.states import RequestKind
from nightjar.jobs.vector_records import PromptVector
from nightjar.pipeline.planning.context_limit import ContextLimit, EncodeError, is_chat
from nightjar.pipeline.planning.placeholders import (
    PLACEHOLDER,
    VectorLookup,
    join_at_placeholders,
    named_adapter,
    named_vectors,
    place_vectors,
)


class Encoder:
    """Turns queued requests into token ids for one model.

    Args:
        config: Sizes of the model; its context length bounds every request.
        tokenizer: The model's own tokenizer.
        find_vectors: Looks references to prompt vectors up.
        chat_template: Renders messages as a prompt; None where the model has no template.
        fingerprint: Of the model. Vectors that were trained for another one are refused; None
            accepts them.
        no_adapters: Why requests that name a LoRA adapter are refused; None accepts them.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        find_vectors: VectorLookup,
        chat_template: ChatTemplate | None = None,
        fingerprint: str | None = None,
        *,
        no_adapters: str | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._find_vectors = find_vectors
        self._chat_template = chat_template
        self._fingerprint = fingerprint
        self._no_adapters = no_adapters
        self._prompt_id = tokenizer.token_id(PROMPT_TOKEN)
        self._prefix = list(tokenizer.prefix_ids)
        self._context = ContextLimit(config.context_length, tokenizer.most_bytes)

    def encode(
        self, requests: Sequence[QueuedRequest]
    ) -> tuple[list[EncodedRequest], list[tuple[int, RequestError]]]:
        """Encode requests together; return those that fit and `(request id, error)` of the rest."""
        vectors = self._vectors_of(requests)
        rejected: list[tuple[int, RequestError]] = []
        texts: list[tuple[QueuedRequest, list[str]]] = []
        for request in requests:
            try:
                given = self._texts(request)
                self._context.check_bytes(request, given)
                texts.append((request, given))
            except EncodeError as error:
                rejected.append((request.id, error.error))
        pieces = [text.split(PROMPT_TOKEN) for _, group in texts for text in group]
        flat = [piece for group in pieces for piece in group]
        ids = iter(self._tokenizer.encode_batch(flat, self._config.context_length))
        pieces_of = iter(pieces)
        encoded: list[EncodedRequest] = []
        for request, group in texts:
            # Advance both iterators before this request can be refused.
            split = [[next(ids) for _ in next(pieces_of)] for _ in group]
            try:
                encoded.append(self._assemble(request, split, vectors))
            except EncodeError as error:
                rejected.append((request.id, error.error))
        return encoded, rejected

    def _vectors_of(self, requests: Sequence[QueuedRequest]) -> Mapping[str, PromptVector]:
        """Look up what the requests, of one job, name: one look-up for all of them."""
        references = {
            str(request.body[field])
            for request in requests
            for field in ("prompt_vector", "adapter")
            if request.body.get(field) is not None
        }
        return self._find_vectors(references, requests[0].job_id) if references else {}

    def _texts(self, request: QueuedRequest) -> list[str]:
        """Return the texts to tokenize, by segment; none for a prompt given as token ids."""
        body = request.body
        if request.kind is RequestKind.RANK:
            return [body["query"], *body["documents"]]
        if is_chat(request):
            return [self._render(body["messages"], body["chat_template_kwargs"])]
        return [body["prompt"]] if isinstance(body["prompt"], str) else []

    def _render(self, messages: Sequence[dict[str, str]], variables: dict[str, Any]) -> str:
        """Render messages as a prompt with the model's template."""
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
        self,
        request: QueuedRequest,
        split: Sequence[list[list[int]]],
        known: Mapping[str, PromptVector],
    ) -> EncodedRequest:
        if split:
            # A tokenizer that knows the prompt token splits the text there, too.
            segments = [join_at_placeholders(pieces) for pieces in split]
            placeholders = sum(map(len, split)) - len(split)
            if not is_chat(request):  # a chat template writes the first tokens itself
                segments[0] = self._with_prefix(segments[0])
        else:
            segments = [self._check_ids(request.body["prompt"])]
            placeholders = segments[0].count(PLACEHOLDER)
        reference = request.body.get("prompt_vector")
        vectors = named_vectors(reference, self._config.hidden_size, self._fingerprint, known)
        adapter_reference = request.body.get("adapter")
        adapter = named_adapter(adapter_reference, self._fingerprint, known)
        if adapter is not None and self._no_adapters is not None:
            raise EncodeError("invalid_value", self._no_adapters, "body.adapter")
        segments = place_vectors(segments, placeholders, vectors, self._config.vocab_size)
        self._context.check_tokens(request, segments)
        return EncodedRequest(
            id=request.id,
            segments=segments,
            prompt_vector=None if vectors is None else vectors.key,
            vector_reference=reference,
            adapter=None if adapter is None else adapter.key,
            adapter_reference=adapter_reference,
            asked=without_texts(request.body),
        )

    def _with_prefix(self, ids: list[int]) -> list[int]:
        """Put the model's first tokens, such as Llama's begin-of-text, before the ids.

        Ids that begin with these tokens already are returned as they are.
        """
        prefix = self._prefix
        return ids if not ids or ids[: len(prefix)] == prefix else prefix + ids

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        vocabulary = self._config.vocab_size
        for index, token_id in enumerate(ids):
            if not 0 <= token_id < vocabulary:
                raise EncodeError(
                    "invalid_value",
                    f"prompt[{index}] is {token_id}; token ids of this model are 0 to "
                    f"{vocabulary - 1}",
                    f"body.prompt[{index}]",
                )
        return [PLACEHOLDER if token_id == self._prompt_id else token_id for token_id in ids]

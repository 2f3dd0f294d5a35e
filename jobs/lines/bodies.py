"""The request bodies: what `/v1/completions`, `/v1/chat/completions` and `/v1/rerank` accept.

Fields of OpenAI's API that would change the answer and that Nightjar does not
know are refused; those that change nothing are accepted and dropped.
"""

import difflib
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from nightjar.requests import (
    BODY_TEMPERATURE,
    LIMITS,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_DOCUMENTS,
    MAX_LOGIT_BIAS,
    MAX_STOP_BYTES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOKEN_ID,
)

MAX_MESSAGES = 10_000
MAX_ROLE = 64  # characters
MAX_VARIABLE_DEPTH = 32

# What a chat template is given beside the request's own variables.
TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# Accepted and dropped: they say who asks, not what is asked.
HARMLESS_FIELDS = frozenset(
    {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "stream_options"}
    | {"user"}
)
# Accepted with the value that changes nothing; null is always such a value.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "stream": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "max_tokens_per_doc": (),
    "truncate_prompt_tokens": (),
    "response_format": (),
    "tools": ([],),
}


def _refuse(code: str, message: str, field: str | None = None) -> PydanticCustomError:
    # The message is handed over as context, so that braces in it are not placeholders.
    return PydanticCustomError(code, "{message}", {"message": message, "field": field})


def _printable(name: str) -> str:
    """A field name that came from outside, cut and made harmless for logs and SQL."""
    return ascii(name[:40])[1:-1]


def _check_text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _refuse(
                "invalid_encoding",
                "holds half of a surrogate pair, which is no character; send both halves "
                "(such as \\ud83d\\ude00) or plain UTF-8",
            ) from None
    return value


def _check_prompt(value: object) -> object:
    """One prompt: a text, or token ids; a list of one text counts as that text."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise _refuse("invalid_value", "is empty; give at least one character")
        return _check_text(value)
    if not isinstance(value, list):
        raise _refuse("invalid_value", "must be a text or a list of token ids")
    if not value:
        raise _refuse("invalid_value", "is empty; give at least one token id")
    if any(isinstance(item, (str, list)) for item in value):
        raise _refuse("unsupported", "holds several prompts; write one line for each of them")
    if not all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in value):
        raise _refuse("invalid_value", f"token ids must be integers from 0 to {MAX_TOKEN_ID}")
    return value


def _check_texts(value: object, most: int, most_bytes: int) -> list[object]:
    """A text or several, none of them empty or too long."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise _refuse("invalid_value", "must be a text or a list of texts")
    if len(texts) > most:
        raise _refuse("invalid_value", f"holds {len(texts)} texts; give at most {most}")
    for text in texts:
        if not isinstance(text, str):
            raise _refuse("invalid_value", "must be a text or a list of texts")
        if not text:
            raise _refuse("invalid_value", "holds an empty text; remove it")
        if len(_check_text(text).encode()) > most_bytes:
            raise _refuse("invalid_value", f"holds a text of more than {most_bytes} bytes")
    return texts


def _check_stop(value: object) -> object:
    return _check_texts(value, MAX_STOPS, MAX_STOP_BYTES)


def _check_bad_words(value: object) -> object:
    return _check_texts(value, MAX_BAD_WORDS, MAX_BAD_WORD_BYTES)


def _check_stop_token_ids(value: object) -> object:
    if not isinstance(value, list) or not all(
        type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in value
    ):
        raise _refuse("invalid_value", f"must be a list of integers from 0 to {MAX_TOKEN_ID}")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise _refuse("invalid_value", f"holds {len(value)} ids; give at most {MAX_STOP_TOKEN_IDS}")
    return value


def _check_logit_bias(value: object) -> object:
    """Token ids, as JSON's keys are: in quotes; and numbers."""
    if not isinstance(value, dict):
        raise _refuse("invalid_value", "must be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise _refuse("invalid_value", f"holds {len(value)} tokens; give at most {MAX_LOGIT_BIAS}")
    biases: dict[str, float] = {}
    for token, bias in value.items():
        if not _TOKEN_ID.fullmatch(token) or int(token) > MAX_TOKEN_ID:
            raise _refuse("invalid_value", f'its keys must be token ids, "0" to "{MAX_TOKEN_ID}"')
        if type(bias) not in (int, float) or not _BIAS.holds(bias):
            raise _refuse("invalid_value", f"the bias of token {token} must be {_BIAS.words()}")
        biases[token] = float(bias)
    return biases


# One way to write each, so that no token can be given twice.
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_BIAS = LIMITS["logit_bias"]


def _check_logprobs(value: object) -> object:
    # What a chat request calls logprobs is a bool; False says here, too, that none are wanted.
    return None if value is False else value


def _chat_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's chat API asks with a bool, and says with top_logprobs how many."""
    asked, top = body.pop("logprobs", None), body.pop("top_logprobs", None)
    if asked not in (None, False, True):
        raise _refuse("invalid_value", "must be true or false; see top_logprobs", "logprobs")
    if not asked and top is not None:
        raise _refuse("invalid_value", "needs logprobs: true", "top_logprobs")
    if asked:
        body["logprobs"] = 0 if top is None else top
    return body


def _check_documents(value: object) -> object:
    """Documents as plain texts; Cohere's {"text": ...} is accepted."""
    if not isinstance(value, list):
        raise _refuse("invalid_value", "must be a list of texts")
    if not value:
        raise _refuse("invalid_value", "is empty; give at least one document")
    if len(value) > MAX_DOCUMENTS:
        raise _refuse(
            "invalid_value",
            f"holds {len(value)} documents; give at most {MAX_DOCUMENTS} a line",
        )
    return [_document_text(item, number) for number, item in enumerate(value)]


def _document_text(item: object, number: int) -> str:
    text = item.get("text") if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise _refuse("invalid_value", f'document {number} must be a text or {{"text": ...}}')
    if not text:
        raise _refuse("invalid_value", f"document {number} is empty; remove it or give it a text")
    return _check_text(text)


def _checked_text(value: object) -> object:
    return _check_text(value) if isinstance(value, str) else value


def _checked_name(value: object) -> object:
    if isinstance(value, str) and "\x00" in _check_text(value):
        raise _refuse("invalid_value", "holds a NUL character; remove it")
    return value


def _check_query(value: object) -> object:
    if value == "":
        raise _refuse("invalid_value", "is empty; give at least one character")
    return _checked_text(value)


def _check_messages(value: object) -> object:
    """Messages with a role and a plain text; a list of text parts counts as their text."""
    if not isinstance(value, list):
        raise _refuse("invalid_value", 'must be a list of {"role": ..., "content": ...}')
    if not value:
        raise _refuse("invalid_value", "is empty; give at least one message")
    if len(value) > MAX_MESSAGES:
        raise _refuse(
            "invalid_value", f"holds {len(value)} messages; give at most {MAX_MESSAGES} a line"
        )
    return [_message(item, number) for number, item in enumerate(value)]


def _message(item: object, number: int) -> dict[str, str]:
    fields = {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else {}
    role = fields.pop("role", None)
    if not isinstance(role, str) or not 1 <= len(role) <= MAX_ROLE:
        raise _refuse("invalid_value", f'message {number} needs a role, such as "user"')
    message = {"role": _check_text(role), "content": _content(fields.pop("content", None), number)}
    name = fields.pop("name", None)
    if isinstance(name, str):
        message["name"] = _check_text(name)
    elif name is not None:
        raise _refuse("invalid_value", f"message {number}: name must be a text")
    if fields:
        raise _refuse(
            "unsupported",
            f"message {number} holds more than role, content and name; calls of tools, images and "
            "the like are not supported",
        )
    return message


def _content(value: object, number: int) -> str:
    """The text of a message."""
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in parts
    ]
    known = [_check_text(text) for text in texts if isinstance(text, str)]
    if len(known) < len(texts):
        raise _refuse(
            "invalid_value",
            f"message {number}: content must be a text, or a list of "
            '{"type": "text", "text": ...}',
        )
    return "".join(known)


def _check_variables(value: object) -> object:
    if not isinstance(value, dict):
        raise _refuse("invalid_value", "must be an object of names and values")
    taken = TEMPLATE_NAMES & value.keys()
    if taken:
        raise _refuse("invalid_value", f"{min(taken)!r} is not for the request to set; take it out")
    _check_storable(value, MAX_VARIABLE_DEPTH)
    return value


def _check_storable(value: object, depth: int) -> None:
    """Refuse what a template's variable cannot be stored with, at any depth."""
    if depth < 0:
        raise _refuse(
            "invalid_value", f"is nested deeper than {MAX_VARIABLE_DEPTH} levels; flatten it"
        )
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise _refuse("invalid_value", "holds a number that is too large; give a finite number")
    elif isinstance(value, dict):
        for name, inner in value.items():
            _check_text(name)
            _check_storable(inner, depth - 1)
    elif isinstance(value, list):
        for inner in value:
            _check_storable(inner, depth - 1)


Name = Annotated[str, BeforeValidator(_checked_name)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: Annotated[Name, Field(min_length=1, max_length=512)] | None = None
    prompt_vector: Annotated[Name, Field(min_length=1, max_length=255)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        known = cls.__pydantic_fields__
        # null stands for "the default" in OpenAI's API.
        return {
            name: value
            for name, value in data.items()
            if value is not None and (name in known or cls._is_kept(name, value))
        }

    @classmethod
    def _is_kept(cls, name: str, value: object) -> bool:
        """False for a field that changes nothing; any other stranger is refused."""
        if name in HARMLESS_FIELDS or value in NEUTRAL_VALUES.get(name, ()):
            return False
        if name in NEUTRAL_VALUES:
            raise _refuse(
                "unsupported", "is not supported with this value; leave it out", _printable(name)
            )
        near = difflib.get_close_matches(name[:40], cls.model_fields, n=1)
        mend = f"did you mean {near[0]!r}?" if near else "leave it out"
        raise _refuse("unsupported", f"is not a field of this request; {mend}", _printable(name))


def _within(name: str, *, low: float | None = None, high: float | None = None) -> Any:  # noqa: ANN401
    """Pydantic's bounds of a field, from its limit; low and high replace an end."""
    limit = LIMITS[name]
    least = limit.low if low is None else low
    most = limit.high if high is None else high
    return Field(gt=least, le=most) if limit.above else Field(ge=least, le=most)


class GenerationBody(_Body):
    """What every request for a text has, beside what the text goes on from."""

    max_tokens: Annotated[int, _within("max_tokens")] = 16
    temperature: Annotated[float, _within("temperature", high=BODY_TEMPERATURE)] = 1.0  # 0: greedy
    top_p: Annotated[float, _within("top_p")] = 1.0
    top_k: Annotated[int, _within("top_k", low=-1)] = 0  # 0 and -1: off
    min_p: Annotated[float, _within("min_p")] = 0.0
    top_a: Annotated[float, _within("top_a")] = 0.0
    seed: Annotated[int, _within("seed")] | None = None
    repetition_penalty: Annotated[float, _within("repetition_penalty")] = 1.0
    presence_penalty: Annotated[float, _within("presence_penalty")] = 0.0
    frequency_penalty: Annotated[float, _within("frequency_penalty")] = 0.0
    logit_bias: Annotated[dict[str, float], BeforeValidator(_check_logit_bias)] = Field(
        default_factory=dict
    )
    bad_words: Annotated[list[str], BeforeValidator(_check_bad_words)] = Field(default_factory=list)
    stop: Annotated[list[str] | None, BeforeValidator(_check_stop)] = None
    stop_token_ids: Annotated[list[int], BeforeValidator(_check_stop_token_ids)] = Field(
        default_factory=list
    )
    min_tokens: Annotated[int, _within("min_tokens")] = 0
    ignore_eos: bool = False
    n: Annotated[int, _within("n")] = 1
    best_of: Annotated[int | None, Field(exclude=True)] = None
    beam_width: Annotated[int, _within("beam_width")] | None = None
    length_penalty: Annotated[float, _within("length_penalty")] = 1.0
    early_stopping: bool = False
    logprobs: Annotated[
        Annotated[int, _within("logprobs")] | None, BeforeValidator(_check_logprobs)
    ] = None

    @model_validator(mode="after")
    def _one_way_to_say_off(self) -> Self:
        if self.top_k == -1:  # how vLLM says that top_k is off
            self.top_k = 0
        if self.beam_width is not None and "temperature" not in self.model_fields_set:
            self.temperature = 0.0  # beams are searched, not drawn
        return self

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise _refuse(
                "invalid_value",
                f"is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}",
                "min_tokens",
            )
        if self.best_of not in (None, self.n):
            raise _refuse(
                "unsupported", "is not supported; leave it out: n texts are computed", "best_of"
            )
        if self.beam_width is None:
            self._check_samples()
        else:
            self._check_beams(self.beam_width)
        return self

    def _check_samples(self) -> None:
        if self.n > 1 and self.temperature == 0:
            raise _refuse(
                "invalid_value",
                f"is {self.n} with temperature 0, where every text is the same; give a "
                "temperature or a beam_width, or leave n out",
                "n",
            )
        for field in ("length_penalty", "early_stopping"):
            if field in self.model_fields_set:
                raise _refuse(
                    "invalid_value", "needs a beam_width; give one or leave it out", field
                )

    def _check_beams(self, width: int) -> None:
        if self.n > width:
            raise _refuse(
                "invalid_value", f"is {self.n}, more than the {width} beams; raise beam_width", "n"
            )
        changes = {
            "temperature": self.temperature > 0,
            "repetition_penalty": self.repetition_penalty != 1,
            "presence_penalty": self.presence_penalty != 0,
            "frequency_penalty": self.frequency_penalty != 0,
            "logit_bias": bool(self.logit_bias),
        }
        for field in (name for name, changed in changes.items() if changed):
            raise _refuse(
                "invalid_value",
                "cannot be combined with beam_width: beams are compared by the model's own "
                "log-probabilities; leave one of them out",
                field,
            )


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`."""

    prompt: Annotated[str | list[int], BeforeValidator(_check_prompt)]


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`.

    chat_template_kwargs: variables of the model's template, such as {"enable_thinking": false}.
    """

    messages: Annotated[list[dict[str, str]], BeforeValidator(_check_messages)]
    max_tokens: Annotated[int, _within("max_tokens")] = 256
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_check_variables)] = Field(
        default_factory=dict
    )

    @model_validator(mode="before")
    @classmethod
    def _names_of_the_chat_api(cls, data: object) -> object:
        """What OpenAI's chat API calls otherwise: max_completion_tokens, logprobs."""
        if not isinstance(data, dict):
            return data
        named = _chat_logprobs(dict(data))
        asked = named.pop("max_completion_tokens", None)
        if asked is None:
            return named
        if named.get("max_tokens") not in (None, asked):
            raise _refuse(
                "invalid_value",
                "differs from max_completion_tokens, which means the same; give one of them",
                "max_tokens",
            )
        return named | {"max_tokens": asked}


class RerankBody(_Body):
    """The body of `/v1/rerank`; documents are plain texts after validation."""

    query: Annotated[str, BeforeValidator(_check_query)]
    documents: Annotated[list[str], BeforeValidator(_check_documents)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False

"""The request bodies: what `/v1/completions`, `/v1/chat/completions` and `/v1/rerank` accept.

A field of OpenAI's API that Nightjar does not know is refused if it would change the answer. If it
changes nothing, it is accepted and dropped.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from nightjar.jobs.lines.body_schemas import (
    OTHER_CHAT_FIELDS,
    SentDocuments,
    SentMessages,
    SentPrompt,
    SentTexts,
    describe_nulls,
    dropped,
)
from nightjar.jobs.lines.field_checks import (
    check_bad_words,
    check_documents,
    check_logit_bias,
    check_messages,
    check_name,
    check_prompt,
    check_query,
    check_stop,
    check_stop_token_ids,
    check_variables,
    refuse,
)
from nightjar.requests import BODY_TEMPERATURE, LIMITS, contradictions

MAX_TOP_N = 2**31 - 1  # messages to compute processes hold no integers of any size
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
    "parallel_tool_calls": (True, False),  # of calls of tools, of which there are none
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}


def _printable(name: str) -> str:
    """Return a field name from outside, shortened and safe for logs and SQL."""
    return ascii(name[:40])[1:-1]


def _check_logprobs(value: object) -> object:
    # In a chat request, logprobs is a bool. Here too, False means that none are wanted.
    return None if value is False else value


def _chat_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    """Replace OpenAI's two chat fields, logprobs (a bool) and top_logprobs, by one number."""
    asked, top = body.pop("logprobs", None), body.pop("top_logprobs", None)
    if asked not in (None, False, True):
        raise refuse("invalid_value", "must be true or false; see top_logprobs", "logprobs")
    if not asked and top is not None:
        raise refuse("invalid_value", "needs logprobs: true", "top_logprobs")
    if asked:
        body["logprobs"] = 0 if top is None else top
    return body


Name = Annotated[str, BeforeValidator(check_name)]


def _describe_what_is_sent(schema: dict[str, Any]) -> None:
    """Add to the JSON schema of a body what the validators before the fields accept."""
    describe_nulls(schema)
    schema["properties"] |= dropped(HARMLESS_FIELDS, NEUTRAL_VALUES)


class _Body(BaseModel):
    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra=_describe_what_is_sent,
    )

    model: Annotated[Name, Field(min_length=1, max_length=512)] | None = None
    prompt_vector: Annotated[Name, Field(min_length=1, max_length=255)] | None = None
    adapter: Annotated[Name, Field(min_length=1, max_length=255)] | None = None
    # Stands for the texts where kept answers are looked up; it changes nothing else.
    content_key: Annotated[Name, Field(min_length=1, max_length=128)] | None = None

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
        """Return False for an unknown field that changes nothing; refuse any other."""
        if name in HARMLESS_FIELDS or value in NEUTRAL_VALUES.get(name, ()):
            return False
        if name in NEUTRAL_VALUES:
            raise refuse(
                "unsupported", "is not supported with this value; leave it out", _printable(name)
            )
        near = difflib.get_close_matches(name[:40], cls.model_fields, n=1)
        mend = f"did you mean {near[0]!r}?" if near else "leave it out"
        raise refuse("unsupported", f"is not a field of this request; {mend}", _printable(name))


def _within(name: str, *, low: float | None = None, high: float | None = None) -> Any:  # noqa: ANN401
    """Return pydantic's bounds of a field from its limit; low and high replace an end."""
    limit = LIMITS[name]
    least = limit.low if low is None else low
    most = limit.high if high is None else high
    return Field(gt=least, le=most) if limit.above else Field(ge=least, le=most)


class GenerationBody(_Body):
    """The fields of every generation request, without its prompt or messages."""

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
    logit_bias: Annotated[dict[str, float], BeforeValidator(check_logit_bias)] = Field(
        default_factory=dict
    )
    bad_words: Annotated[
        list[str], BeforeValidator(check_bad_words, json_schema_input_type=SentTexts)
    ] = Field(default_factory=list)
    stop: Annotated[
        list[str] | None, BeforeValidator(check_stop, json_schema_input_type=SentTexts)
    ] = None
    stop_token_ids: Annotated[list[int], BeforeValidator(check_stop_token_ids)] = Field(
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
        if self.top_k == -1:  # vLLM's way to switch top_k off
            self.top_k = 0
        if self.beam_width is not None and "temperature" not in self.model_fields_set:
            self.temperature = 0.0  # beams are searched, not drawn
        return self

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        for field, words in contradictions(self, self.beam_width):
            raise refuse("invalid_value", words, field)
        if self.best_of not in (None, self.n):
            raise refuse(
                "unsupported", "is not supported; leave it out: n texts are computed", "best_of"
            )
        for field in ("length_penalty", "early_stopping"):
            if self.beam_width is None and field in self.model_fields_set:
                raise refuse("invalid_value", "needs a beam_width; give one or leave it out", field)
        return self


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`."""

    prompt: Annotated[
        str | list[int], BeforeValidator(check_prompt, json_schema_input_type=SentPrompt)
    ]


def _describe_what_a_chat_is_sent(schema: dict[str, Any]) -> None:
    _describe_what_is_sent(schema)
    schema["properties"] |= OTHER_CHAT_FIELDS


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`.

    chat_template_kwargs: variables of the model's template, such as {"enable_thinking": false}.
    """

    model_config = ConfigDict(json_schema_extra=_describe_what_a_chat_is_sent)

    messages: Annotated[
        list[dict[str, str]], BeforeValidator(check_messages, json_schema_input_type=SentMessages)
    ]
    max_tokens: Annotated[int, _within("max_tokens")] = 256
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(check_variables)] = Field(
        default_factory=dict
    )

    @model_validator(mode="before")
    @classmethod
    def _names_of_the_chat_api(cls, data: object) -> object:
        """Rename what OpenAI's chat API names differently: max_completion_tokens, logprobs."""
        if not isinstance(data, dict):
            return data
        named = _chat_logprobs(dict(data))
        asked = named.pop("max_completion_tokens", None)
        if asked is None:
            return named
        if named.get("max_tokens") not in (None, asked):
            raise refuse(
                "invalid_value",
                "differs from max_completion_tokens, which means the same; give one of them",
                "max_tokens",
            )
        return named | {"max_tokens": asked}


class RerankBody(_Body):
    """The body of `/v1/rerank`; documents are plain texts after validation."""

    query: Annotated[str, BeforeValidator(check_query), Field(min_length=1)]
    documents: Annotated[
        list[str], BeforeValidator(check_documents, json_schema_input_type=SentDocuments)
    ]
    top_n: Annotated[int, Field(ge=1, le=MAX_TOP_N)] | None = None
    return_documents: bool = False

"""What the fields of a body may be sent as, for the OpenAPI document.

A body's validators put several ways to say one thing into one form. The fields of
`jobs/lines/bodies.py` have the type of that form, and here are the types of what is sent.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from nightjar.jobs.lines.field_checks import MAX_MESSAGES, MAX_ROLE
from nightjar.requests import LIMITS, MAX_DOCUMENTS, MAX_TOKEN_ID

_Text = Annotated[str, Field(min_length=1)]
_TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
SentPrompt = (
    _Text
    | Annotated[list[_TokenId], Field(min_length=1)]
    | Annotated[list[_Text], Field(min_length=1, max_length=1)]
)
SentTexts = _Text | list[_Text] | None


class TextPart(TypedDict):
    """A part of a message; other kinds are refused."""

    type: Literal["text"]
    text: str


@with_config(ConfigDict(json_schema_extra={"additionalProperties": {"type": "null"}}))
class SentMessage(TypedDict):
    """A message of a chat. The parts of its content are joined; other fields may only be null."""

    role: Annotated[str, Field(min_length=1, max_length=MAX_ROLE)]
    content: str | list[TextPart]
    name: NotRequired[str | None]


SentMessages = Annotated[list[SentMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


@with_config(ConfigDict(extra="allow"))
class SentDocument(TypedDict):
    """A document in Cohere's shape; its other fields are not read."""

    text: _Text


SentDocuments = Annotated[list[_Text | SentDocument], Field(min_length=1, max_length=MAX_DOCUMENTS)]

_LOGPROBS, _MAX_TOKENS = LIMITS["logprobs"], LIMITS["max_tokens"]
# What only OpenAI's chat API names so. They become `logprobs` and `max_tokens`.
OTHER_CHAT_FIELDS: dict[str, Any] = {
    "logprobs": {
        "type": ["boolean", "null"],
        "description": "Whether each token comes with its log-probability.",
    },
    "top_logprobs": {
        "type": ["integer", "null"],
        "minimum": _LOGPROBS.low,
        "maximum": _LOGPROBS.high,
        "description": "How many of the most likely tokens are shown; needs `logprobs`.",
    },
    "max_completion_tokens": {
        "type": ["integer", "null"],
        "minimum": _MAX_TOKENS.low,
        "maximum": _MAX_TOKENS.high,
        "description": "The same as `max_tokens`.",
    },
}


def describe_nulls(schema: dict[str, Any]) -> None:
    """Let each field that may be left out be null: it stands for the default in OpenAI's API."""
    for name, field in schema["properties"].items():
        kinds = field.get("anyOf", [field])
        if name in schema["required"] or {"type": "null"} in kinds:
            continue
        told = {key: field.pop(key) for key in ("title", "default") if key in field}
        if "anyOf" not in field:
            kinds = [dict(field)]
        field.clear()
        field |= {**told, "anyOf": [*kinds, {"type": "null"}]}


def dropped(harmless: Iterable[str], neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The schemas of fields that are accepted and dropped.

    Args:
        harmless: They may have any value.
        neutral: The values that change nothing, by the name of the field.
    """
    any_value = {"description": "Accepted, and changes nothing."}
    told = {"description": "Accepted with these values, which change nothing."}
    return {name: dict(any_value) for name in sorted(harmless)} | {
        name: {**told, "enum": [*values, None]} for name, values in neutral.items()
    }

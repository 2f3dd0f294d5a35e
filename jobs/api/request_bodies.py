"""Small JSON bodies: their models, and how they are read.

FastAPI would read a body of any length into memory. Here it is read up to a limit, within a time.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from nightjar.jobs.api.batch_bodies import CreateBatch
from nightjar.jobs.api.body import RefusedRequestError, UploadLimits
from nightjar.jobs.api.documenting import example_content, reference
from nightjar.jobs.api.json_body import read_small_body
from nightjar.jobs.events import EventType
from nightjar.jobs.lines.bodies import ChatBody, CompletionBody, RerankBody
from nightjar.jobs.records import JsonObject
from nightjar.jobs.schedules.fields import Finding, ScheduleFields
from nightjar.jobs.webhooks.targets import LONGEST_URL

MAX_BYTES = 64 * 1024
_PATIENCE_S = 30.0
_LIMITS = UploadLimits(stalled_after_s=_PATIENCE_S, deadline_s=_PATIENCE_S)

Model = TypeVar("Model", bound=BaseModel)


class NewWebhookBody(BaseModel):
    """A webhook to be made."""

    model_config = ConfigDict(extra="forbid", strict=True)

    url: str = Field(
        max_length=LONGEST_URL,
        description="Where events are sent: https, to a public address.",
    )
    events: list[EventType] = Field(
        [],
        strict=False,
        max_length=len(EventType),
        description="The events that are sent; all of them if empty.",
    )


class WebhookChange(BaseModel):
    """What is to change of a webhook."""

    model_config = ConfigDict(extra="forbid", strict=True)

    enabled: bool = Field(description="False: no events are sent.")


def _without_default(schema: JsonObject) -> None:
    schema.pop("default", None)


def _optional(kind: FieldInfo) -> object:
    told = Field(description=kind.description, json_schema_extra=_without_default)
    return Annotated[kind.annotation, *kind.metadata, told]


_CHANGES: dict[str, Any] = {
    name: (_optional(kind), None) for name, kind in ScheduleFields.model_fields.items()
}
ScheduleChange = create_model(
    "ScheduleChange",
    __config__=ConfigDict(extra="forbid", strict=True),
    __doc__="What is to change of a schedule; what is not given stays.",
    **_CHANGES,
)

# What a call may hold beside the body of a batch line; call_body.py reads it.
_STREAM: JsonObject = {
    "stream": {
        "type": ["boolean", "null"],
        "description": "Answer with server-sent events.",
    },
    "stream_options": {
        "type": ["object", "null"],
        "properties": {
            "include_usage": {
                "type": ["boolean", "null"],
                "description": "Tell the usage in an event of its own before the end.",
            }
        },
    },
}
_PRIORITY: JsonObject = {
    "priority": {"description": "Accepted, and changes nothing: every call goes first."}
}
BODIES: Mapping[type[BaseModel], JsonObject] = {
    NewWebhookBody: {},
    WebhookChange: {},
    ScheduleFields: {},
    ScheduleChange: {},
    CreateBatch: {},
    CompletionBody: _STREAM,
    ChatBody: _STREAM,
    RerankBody: _PRIORITY,
}
"""For the OpenAPI document: every model of a body that a route reads itself, and the properties
that its schema lacks."""


def json_body(
    model: type[Model], tell: Callable[[ValidationError], Sequence[Finding]] | None = None
) -> Callable[[Request], Awaitable[Model]]:
    """A FastAPI dependency that reads the body into the model; it raises RefusedRequestError.

    `tell` words what is wrong; pydantic's own words are used by default.
    """

    async def read(request: Request) -> Model:
        body = await read_small_body(request, _LIMITS, MAX_BYTES)
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise invalid_body(*(tell or _plainly)(error)[0]) from None

    return read


def _plainly(error: ValidationError) -> list[Finding]:
    found = error.errors(include_input=False, include_url=False)
    return [(tuple(map(str, one["loc"])), one["msg"]) for one in found]


def invalid_body(place: Sequence[str], message: str) -> RefusedRequestError:
    """The refusal of a body whose field at this place is wrong."""
    param = ".".join(["body", *place])
    return RefusedRequestError(400, "invalid_body", f"{param}: {message}", param)


def body_documented(model: type[BaseModel], example: object) -> dict[str, Any]:
    """For `openapi_extra` of a route: the body that `json_body` reads."""
    content = example_content(example)
    content["application/json"]["schema"] = reference(model)
    return {"requestBody": {"required": True, "content": content}}

"""Small JSON bodies: their models, and how they are read.

FastAPI would read a body of any length into memory. Here it is read up to a limit, within a time.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.documenting import example_content, reference
from nightjar.jobs.events import EventType
from nightjar.jobs.lines.bodies import ChatBody, CompletionBody, RerankBody
from nightjar.jobs.webhooks.targets import LONGEST_URL

MAX_BYTES = 64 * 1024
PATIENCE_S = 30.0

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


BODIES: tuple[type[BaseModel], ...] = (
    NewWebhookBody,
    WebhookChange,
    CompletionBody,
    ChatBody,
    RerankBody,
)
"""For the OpenAPI document: every model of a body that a route reads itself."""


def json_body(model: type[Model]) -> Callable[[Request], Awaitable[Model]]:
    """A FastAPI dependency that reads the body into the model; it raises RefusedRequestError."""

    async def read(request: Request) -> Model:
        body = await _read(request)
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            param = ".".join(["body", *map(str, first["loc"])])
            message = f"{param}: {first['msg']}"
            raise RefusedRequestError(400, "invalid_body", message, param) from None

    return read


def body_documented(model: type[BaseModel], example: object) -> dict[str, Any]:
    """For `openapi_extra` of a route: the body that `json_body` reads."""
    content = example_content(example)
    content["application/json"]["schema"] = reference(model)
    return {"requestBody": {"required": True, "content": content}}


async def _read(request: Request) -> bytes:
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        message = "compressed bodies are not taken; send the JSON as it is"
        raise RefusedRequestError(415, "unsupported_encoding", message, "Content-Encoding")
    body = bytearray()
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BYTES:
                    message = f"the body is longer than {MAX_BYTES} bytes"
                    raise RefusedRequestError(413, "body_too_large", message)
    except TimeoutError as error:
        message = f"the body did not come within {PATIENCE_S:.0f} s"
        raise RefusedRequestError(408, "body_too_slow", message) from error
    except ClientDisconnect as error:
        raise RefusedRequestError(400, "body_broken_off", "the body broke off") from error
    return bytes(body)

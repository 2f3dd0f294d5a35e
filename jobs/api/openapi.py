"""The OpenAPI document of the API.

FastAPI makes it from the routes and their types. Here it gets what routes do not say themselves:
how keys are sent, and that a wrong parameter is answered with status 400 and not with 422.
"""

import json
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from nightjar.jobs.api import examples
from nightjar.jobs.api.documenting import EXAMPLE, example_content
from nightjar.jobs.api.request_bodies import BODIES
from nightjar.jobs.api.schemas import ErrorAnswer
from nightjar.jobs.events import EventPayload
from nightjar.jobs.records import JsonObject

_DESCRIPTION = """\
Batch inference for GPT decoders: jobs of completions, chats and rankings.

Every error has the shape of `ErrorAnswer`. Keys are sent as `Authorization: Bearer KEY`; a
deployment without keys, which listens on loopback alone, asks for none.

Moments are seconds since 1970.
"""
_TAGS = [
    {"name": "jobs", "description": "Submit, follow and steer jobs."},
    {"name": "results", "description": "What has landed of a job."},
    {"name": "files", "description": "Files of batches, as OpenAI's."},
    {"name": "batches", "description": "Jobs of files, as OpenAI's batches."},
    {"name": "calls", "description": "Single calls, as OpenAI's and Cohere's."},
    {"name": "models", "description": "Which models there are, and which are served."},
    {"name": "schedules", "description": "What runs when: nightly runs of tasks and files."},
    {"name": "webhooks", "description": "Where events are sent when a job is over."},
    {"name": "deployment", "description": "Whether the deployment works."},
]
_KEYS = {
    "type": "http",
    "scheme": "bearer",
    "description": "A key of `nightjar keys`. Its scope is read, submit or admin.",
}
_EVENT_HEADERS = {
    "webhook-id": "The id of the event.",
    "webhook-timestamp": "When it was sent, in seconds since 1970.",
    "webhook-signature": "`v1,` and the signature in base64.",
}
_NOT_OURS = ("HTTPValidationError", "ValidationError")  # FastAPI's own errors, never sent


def operation_id(route: APIRoute) -> str:
    """The name of the route's function: generated clients call the operation by it."""
    return route.name


def describe_events(app: FastAPI) -> None:
    """Describe what is sent to webhooks."""

    @app.webhooks.post(
        "event",
        operation_id="receive_event",
        summary="A job is over",
        responses={200: {"description": "Any 2xx: the event was taken and is not sent again."}},
        openapi_extra={
            "parameters": [_header(name, text) for name, text in _EVENT_HEADERS.items()],
            "requestBody": {
                "required": True,
                "content": example_content(examples.EVENT),
            },
        },
    )
    def job_event(body: EventPayload) -> None:
        """Signed by Standard Webhooks; it may come more than once, with the same `webhook-id`."""


def _header(name: str, description: str) -> dict[str, Any]:
    schema = {"type": "string"}
    return {
        "in": "header",
        "name": name,
        "required": True,
        "description": description,
        "schema": schema,
    }


def openapi_document(app: FastAPI) -> JsonObject:
    """The document of the application as it is now."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=_DESCRIPTION,
        routes=app.routes,
        webhooks=app.webhooks.routes,
        tags=_TAGS,
    )
    sections: list[dict[str, Any]] = [document["paths"], document.get("webhooks", {})]
    for operations in (item for section in sections for item in section.values()):
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if path.startswith("/v1/"):
                operation["security"] = [{"key": []}]
    components = document["components"]
    for name in _NOT_OURS:
        components["schemas"].pop(name, None)
    components["schemas"] |= _referred()
    _show_examples(document)
    components["securitySchemes"] = {"key": _KEYS}
    return document


def _show_examples(node: object) -> None:
    """Put each example that waits as JSON text in its place."""
    if isinstance(node, dict):
        if (text := node.pop(EXAMPLE, None)) is not None:
            node["example"] = json.loads(text)
        for inner in node.values():
            _show_examples(inner)
    elif isinstance(node, list):
        for inner in node:
            _show_examples(inner)


def _referred() -> JsonObject:
    """The schemas of errors, and of the bodies that routes read themselves."""
    named: list[type[Any]] = [ErrorAnswer, *BODIES]
    kinds = [TypeAdapter[Any](kind) for kind in named]
    _, made = TypeAdapter.json_schemas(
        [(number, "validation", kind) for number, kind in enumerate(kinds)],
        ref_template="#/components/schemas/{model}",
    )
    found: JsonObject = made["$defs"]
    for kind, more in BODIES.items():
        found[kind.__name__]["properties"] |= more
    return found

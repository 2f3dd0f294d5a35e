"""The answers to single calls, made from the stored outcomes of their rows."""

import json
from collections.abc import Iterator

from nightjar.jobs.api.call_body import refused
from nightjar.jobs.records import CallOutcome, JsonObject

_CHAT_CHUNK = "chat.completion.chunk"
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"  # a comment, which clients pass over


def answer_body(outcome: CallOutcome) -> JsonObject:
    """The body of a success, under the id of its job; raises RefusedRequestError for a failure."""
    if outcome.error is not None or outcome.body is None:
        error = outcome.error
        if error is None:
            raise refused("internal_error", "the answer was lost", None, 500)
        raise refused(error.code, error.message, error.param, outcome.status_code)
    kind, _, _ = str(outcome.body.get("id", "")).rpartition("-")
    return outcome.body | {"id": f"{kind}-{outcome.job_id.removeprefix('job_')}"}


def rerank_body(outcome: CallOutcome, version: str) -> JsonObject:
    """The body of a ranking, with the `meta` of Cohere's API beside the `usage` of Jina's."""
    body = answer_body(outcome)
    tokens = body["usage"]["prompt_tokens"]
    return body | {
        "meta": {
            "api_version": {"version": version},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": tokens},
        }
    }


def event(data: JsonObject) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def stream_events(body: JsonObject, *, include_usage: bool) -> Iterator[bytes]:
    """A whole answer as the events of a stream, `data: [DONE]` at the end.

    `include_usage` adds an event with the usage and without choices before the end. All other
    events then have the field too, as null.
    """
    is_chat = body["object"] == "chat.completion"
    shared = {name: body[name] for name in ("id", "created", "model")}
    shared["object"] = _CHAT_CHUNK if is_chat else body["object"]
    if include_usage:
        shared["usage"] = None
    for choice in body["choices"]:
        for part in _chat_parts(choice) if is_chat else [choice]:
            yield event(shared | {"choices": [part]})
    if include_usage:
        yield event(shared | {"choices": [], "usage": body["usage"]})
    yield DONE


def _chat_parts(choice: JsonObject) -> Iterator[JsonObject]:
    """The role, the text and the end of a choice, as the chat API streams them."""
    index, message = choice["index"], choice["message"]
    role = {"role": message["role"], "content": ""}
    text = {"content": message["content"]}
    yield {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
    yield {"index": index, "delta": text, "logprobs": choice["logprobs"], "finish_reason": None}
    yield {
        "index": index,
        "delta": {},
        "logprobs": None,
        "finish_reason": choice["finish_reason"],
    }

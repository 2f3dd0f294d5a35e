"""Single calls over HTTP: completions, chat completions and rankings, in the shapes of others."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from nightjar.jobs.answer_shapes import ChatCompletion, Completion
from nightjar.jobs.api import openai_examples as examples
from nightjar.jobs.api.answers import (
    KEEP_ALIVE,
    answer_body,
    event,
    rerank_body,
    stream_events,
)
from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.caller import Caller, Submitter
from nightjar.jobs.api.calls import Call, Calls, ClientGoneError
from nightjar.jobs.api.documenting import call_documented
from nightjar.jobs.api.openai_schemas import Ranking
from nightjar.jobs.api.request_bodies import body_documented
from nightjar.jobs.lines.bodies import ChatBody, CompletionBody, RerankBody
from nightjar.jobs.lines.error_shape import error_payload
from nightjar.jobs.lines.parsing import CHAT_URL
from nightjar.jobs.records import CallOutcome

# A stream that has no answer yet begins after so long, and then tells as often that it lives. An
# answer or a failure before that has its own HTTP status.
KEEP_ALIVE_S = 10.0

# Where clients call it, and the name of the operation there.
_RERANKS = {"/rerank": "rerank", "/v1/rerank": "rerank_v1", "/v2/rerank": "rerank_v2"}


def calls_router(calls: Calls) -> APIRouter:
    """`POST /v1/completions`, `/v1/chat/completions` and `/rerank`."""
    router = APIRouter(tags=["calls"])
    statuses = (400, 404, 408, 413, 415, 504)

    @router.post(
        "/v1/completions",
        response_model=Completion,
        responses=call_documented(
            examples.COMPLETION, *statuses, stream=_example(examples.COMPLETION)
        ),
        openapi_extra=body_documented(CompletionBody, examples.NEW_COMPLETION),
    )
    async def complete(request: Request, caller: Submitter) -> Response:
        """Continue a prompt: OpenAI's completions."""
        return await _generate(calls, request, "/v1/completions", caller)

    @router.post(
        CHAT_URL,
        response_model=ChatCompletion,
        responses=call_documented(examples.CHAT, *statuses, stream=_example(examples.CHAT)),
        openapi_extra=body_documented(ChatBody, examples.NEW_CHAT),
    )
    async def chat(request: Request, caller: Submitter) -> Response:
        """Answer messages: OpenAI's chat completions."""
        return await _generate(calls, request, CHAT_URL, caller)

    async def rerank(request: Request, caller: Submitter) -> Response:
        """Order documents by their likelihood after a query: Cohere's and Jina's rerank."""
        call = await calls.begin(request, "/v1/rerank", caller.tenant)
        version = "1" if request.url.path.startswith("/v1/") else "2"
        try:
            return _answered(call, rerank_body(await _outcome(call), version))
        finally:
            call.close()

    for path, name in _RERANKS.items():
        router.add_api_route(
            path,
            rerank,
            name=name,
            methods=["POST"],
            response_model=Ranking,
            responses=call_documented(examples.RANKING, *statuses),
            openapi_extra=body_documented(RerankBody, examples.NEW_RANKING),
        )
    return router


def _example(body: Mapping[str, Any]) -> str:
    """The stream of an answer, for the document."""
    return b"".join(stream_events(dict(body), include_usage=False)).decode()


async def _generate(calls: Calls, request: Request, url: str, caller: Caller) -> Response:
    call = await calls.begin(request, url, caller.tenant)
    streams = False
    try:
        outcome = await call.wait(KEEP_ALIVE_S if call.asked.stream else None)
        if outcome is None:
            streams = True
            return _stream(call, _late(call))
        body = answer_body(outcome)
        if not call.asked.stream:
            return _answered(call, body)
        events = stream_events(body, include_usage=call.asked.include_usage)
        return _stream(call, _each(b"".join(events)))
    finally:
        if not streams:  # else the stream closes it
            call.close()


async def _outcome(call: Call) -> CallOutcome:
    """The outcome; the wait has no end but an outcome or an exception."""
    while (outcome := await call.wait()) is None:
        pass
    return outcome


async def _each(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _late(call: Call) -> AsyncIterator[bytes]:
    """The events of an answer that takes long: comments until it comes. A failure is an event."""
    try:
        yield KEEP_ALIVE
        while (outcome := await call.wait(KEEP_ALIVE_S)) is None:
            yield KEEP_ALIVE
        body = answer_body(outcome)
        for one in stream_events(body, include_usage=call.asked.include_usage):
            yield one
    except ClientGoneError:
        return
    except RefusedRequestError as error:
        yield event(error_payload(error.status, error.code, str(error), error.param))
    finally:
        call.close()


def _answered(call: Call, body: dict[str, object]) -> Response:
    return JSONResponse(body, headers=_headers(call))


def _stream(call: Call, events: AsyncIterator[bytes]) -> Response:
    headers = {**_headers(call), "Cache-Control": "no-cache"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def _headers(call: Call) -> dict[str, str]:
    return {"X-Request-Id": call.job_id}

"""Between the stored request and the compute process: messages out, answer bodies back."""

import hashlib
import math
import time
from dataclasses import replace
from typing import Any

from nightjar.gpu_worker import messages
from nightjar.jobs.records import ClaimedRequest, NewResult, RequestKind


def make_message(request: ClaimedRequest, ticket: int) -> messages.Generate | messages.Rank:
    """The message that asks the compute process for this request."""
    if request.kind is RequestKind.RANK:
        query, *documents = request.segments
        return messages.Rank(
            ticket=ticket,
            query_ids=query,
            documents=documents,
            prompt_vectors=request.prompt_vector,
            top_n=request.body["top_n"],
        )
    body = request.body
    return messages.Generate(
        ticket=ticket,
        token_ids=request.segments[0],
        max_tokens=body["max_tokens"],
        temperature=body["temperature"],
        top_k=body["top_k"],
        top_p=body["top_p"],
        seed=derived_seed(request) if body["seed"] is None else body["seed"],
        stop=[text.encode() for text in body["stop"] or ()],
        ignore_eos=body["ignore_eos"],
        prompt_vectors=request.prompt_vector,
    )


def derived_seed(request: ClaimedRequest) -> int:
    """Seed of a request that names none: of its identity, so that recomputing gives the same."""
    digest = hashlib.sha256(request.custom_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) >> 1


def make_result(request: ClaimedRequest, answer: messages.Answer, model: str) -> NewResult:
    """The result row of an answer."""
    match answer:
        case messages.Failed():
            return NewResult.failure(request.id, answer.code, answer.message, status=500)
        case messages.Generated():
            result = _generated(request, answer, model)
            return _as_chat(result) if "messages" in request.body else result
        case messages.Ranked():
            return _ranked(request, answer, model)


def _generated(request: ClaimedRequest, answer: messages.Generated, model: str) -> NewResult:
    prompt, asked = len(request.segments[0]), int(request.body["max_tokens"])
    saved = asked - answer.completion_tokens
    choice = {
        "index": 0,
        "text": answer.text.decode("utf-8", "replace"),
        "logprobs": None,
        "finish_reason": answer.finish_reason,
    }
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": prompt + answer.completion_tokens,
        "requested_tokens": asked,
        "saved_tokens": saved,
    }
    body = {
        "id": f"cmpl-{request.id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage,
    }
    return NewResult(
        request_id=request.id,
        status_code=200,
        body=body,
        prompt_tokens=prompt,
        completion_tokens=answer.completion_tokens,
        requested_tokens=asked,
        saved_tokens=saved,
        finish_reason=answer.finish_reason,
    )


def _as_chat(result: NewResult) -> NewResult:
    """A completion as `/v1/chat/completions` answers it: the text is the assistant's message."""
    body = dict(result.body or {})
    choices = [
        {
            "index": choice["index"],
            "message": {"role": "assistant", "content": choice["text"]},
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
        }
        for choice in body["choices"]
    ]
    body |= {"id": f"chat{body['id']}", "object": "chat.completion", "choices": choices}
    return replace(result, body=body)


def _ranked(request: ClaimedRequest, answer: messages.Ranked, model: str) -> NewResult:
    documents = request.body["documents"]
    results = [
        _scored(index, nll, count, documents[index] if _returns_documents(request) else None)
        for index, (nll, count) in enumerate(zip(answer.mean_nll, answer.token_counts, strict=True))
        if nll is not None
    ]
    # Equal scores keep the order in which the documents were given.
    results.sort(key=lambda result: (result["mean_nll"], result["index"]))
    prompt = len(request.segments[0]) + sum(answer.token_counts)
    body = {
        "id": f"rerank-{request.id}",
        "object": "rerank",
        "created": int(time.time()),
        "model": model,
        "results": results[: request.body["top_n"]],
        "usage": {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt},
    }
    return NewResult(request_id=request.id, status_code=200, body=body, prompt_tokens=prompt)


def _returns_documents(request: ClaimedRequest) -> bool:
    return bool(request.body.get("return_documents"))


def _scored(index: int, mean_nll: float, count: int, document: str | None) -> dict[str, Any]:
    """One line of a ranking; rerank clients expect a score that is higher where it is better."""
    result: dict[str, Any] = {
        "index": index,
        "relevance_score": math.exp(-mean_nll),
        "mean_nll": mean_nll,
        "token_count": count,
    }
    if document is not None:
        result["document"] = {"text": document}
    return result

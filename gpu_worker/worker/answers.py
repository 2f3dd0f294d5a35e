"""Between the stored request and the compute process: messages out, answer bodies back."""

import codecs
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

from nightjar.gpu_worker.compute import messages
from nightjar.jobs.answer_shapes import (
    CallUsage,
    ChatChoice,
    ChatLogprob,
    ChatLogprobs,
    ChatToken,
    FinishReason,
    RankedDocument,
    TextChoice,
    TextLogprobs,
)
from nightjar.jobs.equality import derived_seed, draws
from nightjar.jobs.records import ClaimedRequest, NewResult
from nightjar.jobs.states import RequestKind
from nightjar.requests import (
    SAME_IN_BODY,
    BeamSearch,
    GenerateRequest,
    RankRequest,
    SamplingParams,
)

# Codes of refusals that the request itself causes; all other codes are internal errors.
_CALLERS_FAULTS = frozenset(
    {"context_exceeded", "empty_documents", "empty_input", "invalid_sampling", "invalid_token"}
    | {"unknown_adapter", "unknown_prompt_vectors"}
)
_SETTINGS = 256  # of requests that differ; those of one job mostly do not
_same_in_body = itemgetter(*SAME_IN_BODY)


def make_message(
    request: ClaimedRequest, ticket: int, *, urgent: bool = False
) -> messages.Generate | messages.Rank:
    """Return the message that asks the compute process to compute this request.

    urgent: a client waits for the answer.
    """
    if request.kind is RequestKind.RANK:
        query, *documents = request.segments
        ranking = RankRequest(
            ticket,
            query,
            documents,
            request.prompt_vector,
            request.body["top_n"],
            urgent,
            request.adapter,
        )
        return messages.Rank(ranking)
    asked = GenerateRequest(
        ticket,
        request.segments[0],
        _sampling(request),
        request.prompt_vector,
        urgent,
        request.adapter,
    )
    return messages.Generate(asked, request.body["bad_words"])


def _sampling(request: ClaimedRequest) -> SamplingParams:
    body = request.body
    seed = body["seed"]
    if seed is None:
        seed = derived_seed(request.custom_id) if draws(body) else 0
    width = body["beam_width"]
    return _sampling_params(
        _same_in_body(body),
        seed,
        tuple(body["logit_bias"].items()),
        tuple(body["stop"] or ()),
        tuple(body["stop_token_ids"]),
        None if width is None else (width, body["length_penalty"], body["early_stopping"]),
    )


@lru_cache(_SETTINGS)
def _sampling_params(
    same: tuple[Any, ...],
    seed: int,
    logit_bias: tuple[tuple[str, float], ...],
    stop: tuple[str, ...],
    stop_token_ids: tuple[int, ...],
    beams: tuple[int, float, bool] | None,
) -> SamplingParams:
    """Return the record; `same` holds the fields of SAME_IN_BODY."""
    return SamplingParams(
        seed=seed,
        logit_bias={int(token): bias for token, bias in logit_bias},
        stop=tuple(text.encode() for text in stop),
        stop_token_ids=stop_token_ids,
        beams=None if beams is None else BeamSearch(*beams),
        **dict(zip(SAME_IN_BODY, same, strict=True)),
    )


@dataclass(frozen=True, slots=True)
class Computed:
    """The model and the precision that an answer names.

    precision: the model's own; an answer that was computed again in a higher one names that too.
    """

    model: str
    precision: str


def make_result(
    request: ClaimedRequest, answer: messages.Answer, by: Computed, reused_documents: int = 0
) -> NewResult:
    """Return an answer's result row; earlier jobs scored `reused_documents` of a ranking."""
    match answer:
        case messages.Failed():
            status = 400 if answer.code in _CALLERS_FAULTS else 500
            return NewResult.failure(request.id, answer.code, answer.message, status=status)
        case messages.Generated():
            return _generated(request, answer, by)
        case messages.Ranked():
            return _ranked(request, answer, by, reused_documents)


def _generated(request: ClaimedRequest, answer: messages.Generated, by: Computed) -> NewResult:
    prompt = len(request.segments[0])
    asked = int(request.body["max_tokens"]) * len(answer.outputs)
    made = sum(output.completion_tokens for output in answer.outputs)
    usage: CallUsage = {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "requested_tokens": asked,
        "saved_tokens": asked - made,
    }
    is_chat = "messages" in request.body
    choice: Callable[[int, messages.Output], TextChoice | ChatChoice]
    choice = _message if is_chat else _choice
    body = {
        "id": f"chatcmpl-{request.id}" if is_chat else f"cmpl-{request.id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": by.model,
        "precision": by.precision,
        "choices": [choice(*numbered) for numbered in enumerate(answer.outputs)],
        "usage": usage,
    }
    if answer.recomputed_in is not None:
        body["recomputed_in"] = answer.recomputed_in
    return NewResult(
        request_id=request.id,
        status_code=200,
        body=body,
        prompt_tokens=prompt,
        completion_tokens=made,
        requested_tokens=asked,
        saved_tokens=asked - made,
        finish_reason=answer.outputs[0].finish_reason,
    )


def _choice(index: int, output: messages.Output) -> TextChoice:
    return {
        "index": index,
        "text": output.text.decode("utf-8", "replace"),
        "logprobs": None if output.reports is None else _logprobs(output.text, output.reports),
        "finish_reason": _finish_reason(output),
    }


def _finish_reason(output: messages.Output) -> FinishReason:
    """Return OpenAI's word: it has one for a stop string and for the end-of-text token."""
    return "length" if output.finish_reason == "length" else "stop"


def _message(index: int, output: messages.Output) -> ChatChoice:
    """Return the answer in the form of `/v1/chat/completions`: the text is a message."""
    logprobs: ChatLogprobs | None = None
    if output.reports is not None:
        logprobs = {"content": [_chat_token(report) for report in output.reports]}
    return {
        "index": index,
        "message": {"role": "assistant", "content": output.text.decode("utf-8", "replace")},
        "logprobs": logprobs,
        "finish_reason": _finish_reason(output),
    }


def _chat_token(report: messages.TokenReport) -> ChatToken:
    """Return one token as the chat API reports it."""
    top = [_chat_logprob(*one) for one in report.top]
    return {**_chat_logprob(report.token, report.logprob), "top_logprobs": top}


def _chat_logprob(token: bytes, logprob: float) -> ChatLogprob:
    return {"token": _shown(token), "logprob": logprob, "bytes": list(token)}


def _logprobs(text: bytes, reports: Sequence[messages.TokenReport]) -> TextLogprobs:
    """Return OpenAI's object: four lists with an entry for each generated token, the stop's too.

    top_logprobs also holds the chosen token. So it has one entry more than was asked for where the
    chosen token is not among the best. text_offset is the index of the character in which the token
    begins; for a token past the end of the text it is the text's length.
    """
    top = [
        {_shown(token): value for token, value in [*report.top, (report.token, report.logprob)]}
        for report in reports
    ]
    return {
        "tokens": [_shown(report.token) for report in reports],
        "token_logprobs": [report.logprob for report in reports],
        "top_logprobs": top,
        "text_offset": list(_offsets(text, [report.begin for report in reports])),
    }


def _offsets(text: bytes, begins: Sequence[int]) -> Iterator[int]:
    """Return the character in which each token begins; begins: its byte offsets, ascending."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    whole, read = 0, 0
    for begin in begins:
        whole += len(decoder.decode(text[read:begin], final=begin >= len(text)))
        read = begin
        yield whole


def _shown(token: bytes) -> str:
    """Return a token's text; bytes of incomplete characters are written as OpenAI does."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _ranked(
    request: ClaimedRequest, answer: messages.Ranked, by: Computed, reused_documents: int
) -> NewResult:
    documents = request.body["documents"] if _returns_documents(request) else None
    results = [
        _scored(index, nll, count, documents and documents[index])
        for index, (nll, count) in enumerate(zip(answer.mean_nll, answer.token_counts, strict=True))
        if nll is not None
    ]
    # Equal scores keep the order of the request's documents.
    results.sort(key=lambda result: (result["mean_nll"], result["index"]))
    kept = results[: request.body["top_n"]]
    prompt = len(request.segments[0]) + sum(answer.token_counts)
    body = {
        "id": f"rerank-{request.id}",
        "object": "rerank",
        "created": int(time.time()),
        "model": by.model,
        "precision": by.precision,
        "results": kept,
        "usage": {"prompt_tokens": prompt, "completion_tokens": 0, "total_tokens": prompt},
    }
    if answer.recomputed_in is not None:
        body["recomputed_in"] = answer.recomputed_in
    if reused_documents:
        body["reused_documents"] = reused_documents
    if len(kept) < len(answer.mean_nll):
        body["document_count"] = len(answer.mean_nll)
    return NewResult(request_id=request.id, status_code=200, body=body, prompt_tokens=prompt)


def _returns_documents(request: ClaimedRequest) -> bool:
    return bool(request.body.get("return_documents"))


def _scored(index: int, mean_nll: float, count: int, document: str | None) -> RankedDocument:
    """Return one entry of a ranking; rerank clients expect that a higher score is better."""
    result: RankedDocument = {
        "index": index,
        "relevance_score": math.exp(-mean_nll),
        "mean_nll": mean_nll,
        "token_count": count,
    }
    if document is not None:
        result["document"] = {"text": document}
    return result

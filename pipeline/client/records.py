"""What the API answers, as typed records; fields that a newer API adds are in `raw`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from nightjar.jobs.lines.batch_lines import line_error
from nightjar.jobs.records import JsonObject
from nightjar.pipeline.client.errors import UnreachableError

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows of a job by outcome."""

    total: int
    completed: int
    failed: int
    cancelled: int
    reused: int = 0


@dataclass(frozen=True, slots=True)
class JobTokens:
    """Tokens of a job's finished rows."""

    prompt_tokens: int
    generated_tokens: int
    requested_tokens: int = 0
    saved_tokens: int = 0
    reused_tokens: int = 0


@dataclass(frozen=True, slots=True)
class JobStatus:
    """How a job stood when the API was asked; moments are seconds since 1970.

    waiting: What the job waits for, in words; None if it does not wait, or was not asked.
    open: Whether the job takes more rows.
    retried: Of `retry`: how many rows are computed again.
    warning: Why the job may begin late, if the API knows of a reason.
    raw: The API's answer.
    """

    id: str
    state: str
    model: str
    counts: Counts
    usage: JobTokens
    created_at: float
    priority: int = 0
    started_at: float | None = None
    finished_at: float | None = None
    expires_at: float | None = None
    requests_per_second: float | None = None
    cancel_requested: bool = False
    open: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    waiting: str | None = None
    retried: int | None = None
    warning: str | None = None
    raw: JsonObject = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_over(self) -> bool:
        """Whether every row has its outcome."""
        return self.finished_at is not None

    @property
    def ended(self) -> int:
        """How many rows have their outcome."""
        return self.counts.completed + self.counts.failed + self.counts.cancelled

    @property
    def succeeded(self) -> bool:
        """Whether the job is over and every row succeeded."""
        return self.is_over and self.counts.completed == self.counts.total


@dataclass(frozen=True, slots=True)
class Model:
    """A model that jobs may name; `served` says whether a GPU worker has it now."""

    id: str
    served: bool
    workers: int
    context_length: int
    fingerprint: str | None = None
    raw: JsonObject = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a request has no answer: `code` is for programs, `message` for people.

    param: The field at fault, if one is.  line: Of the file that was sent, from 1.
    """

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one request: an answer, or `error`.

    text, finish_reason: Of the first choice of a generation.
    texts: Of all its choices, in their order.
    scores: Of a ranking: the score of each document, in the order of the request; None for those
        that `top_n` left out.
    ranking: Of a ranking: the documents' numbers from 0, best first.
    raw: The OpenAI batch output line.
    """

    custom_id: str | None
    text: str | None = None
    finish_reason: str | None = None
    texts: tuple[str, ...] = ()
    scores: tuple[float | None, ...] | None = None
    ranking: tuple[int, ...] | None = None
    error: RowError | None = None
    usage: Usage | None = None
    raw: JsonObject = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ResultPage:
    """Some results, and where the next ones begin.

    has_more: More has landed.  complete: The job is over, and these are the last ones.
    """

    results: list[Result]
    next_after: int
    has_more: bool
    complete: bool


def read_status(answer: JsonObject) -> JobStatus:
    """Return the record of a job; raises UnreachableError if it is none."""
    return converted(answer, JobStatus)


def read_models(answer: JsonObject) -> list[Model]:
    """Return the records of a list of models."""
    return [converted(one, Model) for one in listed(answer)]


def read_jobs(answer: JsonObject) -> list[JobStatus]:
    """Return the records of a page of jobs."""
    return [converted(one, JobStatus) for one in listed(answer)]


def read_results(answer: JsonObject) -> ResultPage:
    """Return a page of results."""
    try:
        found = [read_result(line) for line in listed(answer)]
        return ResultPage(found, int(answer["next_after"]), answer["has_more"], answer["complete"])
    except (KeyError, IndexError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise strange() from error


def read_result(line: JsonObject) -> Result:
    """Return the record of an output line."""
    found = line_error(line)
    if found is not None:
        return Result(line["custom_id"], error=msgspec.convert(found, RowError), raw=line)
    body = line["response"]["body"]
    usage = msgspec.convert(body["usage"], Usage) if body.get("usage") else None
    if "results" in body:
        ranking = tuple(int(one["index"]) for one in body["results"])
        return Result(
            line["custom_id"],
            scores=tuple(_scores(body["results"], 1 + max(ranking, default=-1))),
            ranking=ranking,
            usage=usage,
            raw=line,
        )
    choices = body.get("choices") or []
    texts = tuple(map(_text, choices))
    return Result(
        line["custom_id"],
        text=texts[0] if texts else None,
        finish_reason=choices[0].get("finish_reason") if choices else None,
        texts=texts,
        usage=usage,
        raw=line,
    )


def _text(choice: Mapping[str, Any]) -> str:
    found = choice["message"]["content"] if "message" in choice else choice["text"]
    return str(found)


def _scores(results: list[JsonObject], count: int) -> Iterator[float | None]:
    by_index = {one["index"]: float(one["relevance_score"]) for one in results}
    for index in range(count):
        yield by_index.get(index)


def listed(answer: JsonObject) -> list[JsonObject]:
    """Return the items of a page; raises UnreachableError if it is none."""
    found = answer.get("data")
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise strange()
    return found


def converted(answer: JsonObject, kind: type[Record]) -> Record:
    """Return an answer as a record, with the answer in `raw`; raises UnreachableError."""
    try:
        return msgspec.convert({**answer, "raw": answer}, kind)
    except (TypeError, msgspec.ValidationError) as error:
        raise strange() from error


def strange() -> UnreachableError:
    """Return what to raise for an answer of another version."""
    return UnreachableError("the answer is not one of Nightjar's API of this version")

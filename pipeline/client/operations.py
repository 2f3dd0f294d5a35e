"""The operations of the API as steps: submit, wait, page through results."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal
from urllib.parse import quote

import msgspec

from nightjar.jobs.records import JsonObject
from nightjar.pipeline.client.errors import RequestError, UnfinishedError
from nightjar.pipeline.client.options import SubmitOptions, idempotency_key
from nightjar.pipeline.client.pages import Pages
from nightjar.pipeline.client.parts import Part
from nightjar.pipeline.client.polling import until_over
from nightjar.pipeline.client.records import (
    JobStatus,
    Model,
    Result,
    read_jobs,
    read_models,
    read_results,
    read_status,
)
from nightjar.pipeline.client.steps import Asking, Call, Pause, Steps
from nightjar.pipeline.client.uploads import Upload

Outcome = Literal["all", "succeeded", "failed"]
Action = Literal["cancel", "pause", "resume", "retry"]
Told = Callable[[JobStatus], object]

_BATCH_LINES = "application/jsonl"
_RESULTS_A_PAGE = 1_000


def submit(asking: Asking, upload: Upload, options: SubmitOptions) -> Steps[JobStatus]:
    """Send batch lines; the key that goes with them makes one job of however many tries."""
    call = Call(
        "POST",
        "/v1/jobs",
        _parameters(options),
        {"Content-Type": _BATCH_LINES, "Idempotency-Key": _key(options)},
        upload,
    )
    return read_status((yield from asking.ask(call)))


def open_job(asking: Asking, options: SubmitOptions) -> Steps[JobStatus]:
    """Make a job that rows are appended to; a known key gives the job of that key."""
    headers = {"Idempotency-Key": _key(options)}
    call = Call("POST", "/v1/jobs/open", _parameters(options), headers)
    return read_status((yield from asking.ask(call)))


def append(asking: Asking, job_id: str, part: Part) -> Steps[None]:
    """Append rows to an open job; waits for as long as the API says that too many wait."""
    call = Call(
        "POST",
        f"{_path(job_id)}/rows",
        {"first": part.first},
        {"Content-Type": _BATCH_LINES},
        part.upload(),
    )
    yield from asking.ask(call, longest_wait_s=math.inf)


def seal(asking: Asking, job_id: str, rows: int) -> Steps[JobStatus]:
    """Take no more rows of an open job, which has so many."""
    call = Call("POST", f"{_path(job_id)}/seal", {"rows": rows})
    return read_status((yield from asking.ask(call)))


def _key(options: SubmitOptions) -> str:
    return options.get("idempotency_key") or idempotency_key()


def _parameters(options: SubmitOptions) -> dict[str, str | int]:
    """Return what a job is to be, as the API takes it."""
    query: dict[str, str | int] = {}
    if priority := options.get("priority"):
        query["priority"] = priority
    if (window := options.get("completion_window")) is not None:
        query["completion_window"] = window
    if (model := options.get("model")) is not None:
        query["model"] = model
    if options.get("wait_for_model"):
        query["wait_for_model"] = "true"
    if (kept := options.get("keep_results")) is not None:
        query["keep_results"] = kept
    if metadata := options.get("metadata"):
        query["metadata"] = msgspec.json.encode(dict(metadata)).decode()
    return query


def status(asking: Asking, job_id: str) -> Steps[JobStatus]:
    """Ask how a job stands."""
    return read_status((yield from asking.ask(Call("GET", _path(job_id)))))


def steer(asking: Asking, job_id: str, action: Action) -> Steps[JobStatus]:
    """Cancel, pause, resume or retry a job."""
    return read_status((yield from asking.ask(Call("POST", f"{_path(job_id)}/{action}"))))


def models(asking: Asking) -> Steps[list[Model]]:
    """Ask for the models that jobs may name."""
    return read_models((yield from asking.ask(Call("GET", "/v1/models"))))


def health(asking: Asking) -> Steps[JsonObject]:
    """Ask which parts of the deployment work."""
    return (yield from asking.ask(Call("GET", "/health")))


def wait(asking: Asking, job_id: str, timeout_s: float | None, told: Told) -> Steps[JobStatus]:
    """Ask for a job until it is over; `told` is called with each answer."""

    def late(found: JobStatus) -> str:
        rows = f"{found.ended} of {found.counts.total} rows have their outcome"
        return f"job {job_id!r} is {found.state} after {timeout_s} s: {rows}"

    return (yield from until_over(partial(status, asking, job_id), timeout_s, told, late))


def first_failure(asking: Asking, job_id: str) -> Steps[Result | None]:
    """Ask for the failure that landed first."""
    query: dict[str, str | int] = {"limit": 1, "outcome": "failed", "order": "landed"}
    answer = yield from asking.ask(Call("GET", f"{_path(job_id)}/results", query))
    found = read_results(answer).results
    return found[0] if found else None


class ResultPages:
    """A job's results, page after page.

    Args:
        asking: How calls are sent.
        job_id: The job.
        outcome: Which results.
        follow_every_s: Go on until the job is over, with so many seconds between two calls while
            nothing lands. Without it the pages end with what has landed.
        only_whole: Raise UnfinishedError for a job that is not over.
    """

    def __init__(
        self,
        asking: Asking,
        job_id: str,
        outcome: Outcome,
        *,
        follow_every_s: float | None = None,
        only_whole: bool = False,
    ) -> None:
        self._asking = asking
        self._job_id = job_id
        self._outcome = outcome
        self._every_s = follow_every_s
        self._only_whole = only_whole
        # A job that is not over is read in the order of landing, which never changes behind us.
        self._order: str | None = None if follow_every_s is None else "landed"
        self._after = -1
        self._is_caught_up = False
        self._has_ended = False

    def following(self) -> Steps[list[Result] | None]:
        """Return the next results, at least one; None at the end."""
        while not self._has_ended:
            if self._is_caught_up and self._every_s is not None:
                yield Pause(self._every_s)
            page = read_results((yield from self._ask()))
            self._after = page.next_after
            self._is_caught_up = not page.has_more
            self._has_ended = page.complete if self._every_s is not None else self._is_caught_up
            if page.results:
                return page.results
        return None

    def _ask(self) -> Steps[JsonObject]:
        if self._order is None:
            found = yield from status(self._asking, self._job_id)
            if self._only_whole and not found.is_over:
                raise UnfinishedError(
                    f"job {self._job_id!r} is {found.state}: {found.ended} of {found.counts.total} "
                    "rows have their outcome; call wait() first"
                )
            self._order = "row" if found.is_over else "landed"
        query: dict[str, str | int] = {
            "order": self._order,
            "limit": _RESULTS_A_PAGE,
            "outcome": self._outcome,
            "after": self._after,
        }
        call = Call("GET", f"{_path(self._job_id)}/results", query)
        return (yield from self._asking.ask(call))


def jobs(asking: Asking) -> Pages[JobStatus]:
    """The tenant's jobs, newest first."""
    return Pages(asking, "/v1/jobs", read_jobs)


def _path(job_id: str) -> str:
    if not job_id:
        raise RequestError("the id of a job is empty")
    return f"/v1/jobs/{quote(job_id, safe='')}"

"""Results over HTTP: in pages, or whole as JSON lines."""

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, StreamingResponse

from nightjar.jobs.api import examples
from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.caller import Reader
from nightjar.jobs.api.documenting import JobId, JsonLines, documented, lines_documented
from nightjar.jobs.api.payloads import results_payload
from nightjar.jobs.api.schemas import ResultsPage
from nightjar.jobs.errors import PurgedJobError, UnknownJobError
from nightjar.jobs.lines.batch_lines import json_pieces
from nightjar.jobs.store import Store
from nightjar.jobs.store.result_rows import Outcome
from nightjar.jobs.store.results import Order

MAX_PAGE = 10_000
MAX_AFTER = 2**53  # what JSON's numbers say exactly
_LONGEST_ID = 64

AfterPlace = Annotated[int, Query(ge=-1, le=MAX_AFTER)]


def results_router(store: Store) -> APIRouter:
    """What has landed of a job."""
    router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["results"])

    @router.get(
        "/results",
        response_model=ResultsPage,
        responses=documented(examples.RESULTS_PAGE, 400, 404, 410),
    )
    def page_results(
        job_id: JobId,
        _: Reader,
        after: AfterPlace = -1,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 1_000,
        outcome: Outcome = "all",
        order: Order = "row",
    ) -> JSONResponse:
        """A page of outcomes; ask on with `after=next_after` until `complete` is true.

        A page may hold fewer than `limit`, as its bytes are bounded too. In row order (`order=row`)
        a page of a running job ends before the first row without outcome, `waits_for_row`. In the
        order of landing (`order=landed`) each result comes once, as it lands; one that is retried
        comes again when it lands again.
        """
        page = store.results.page(
            checked_id(job_id), order=order, after=after, limit=limit, outcome=outcome
        )
        # Not as a dict: FastAPI would copy all of it first.
        return JSONResponse(results_payload(page))

    @router.get(
        "/output", response_class=JsonLines, responses=lines_documented(examples.OUTPUT, 404, 410)
    )
    def download_output(job_id: JobId, _: Reader) -> StreamingResponse:
        """Every success so far as JSON lines; see `Nightjar-Job-Complete`."""
        return _download(store, job_id, "succeeded")

    @router.get(
        "/errors", response_class=JsonLines, responses=lines_documented(examples.ERRORS, 404, 410)
    )
    def download_errors(job_id: JobId, _: Reader) -> StreamingResponse:
        """Every failure so far as JSON lines; see `Nightjar-Job-Complete`."""
        return _download(store, job_id, "failed")

    return router


def checked_id(job_id: str) -> str:
    """The id, if a job can have it; raises UnknownJobError."""
    if not is_id(job_id):
        raise UnknownJobError(job_id[:_LONGEST_ID])
    return job_id


def checked_after(job_id: str | None) -> str | None:
    """The id that a page of jobs begins behind; raises RefusedRequestError."""
    if job_id is not None and not (is_id(job_id) and job_id.startswith("job_")):
        raise RefusedRequestError(400, "invalid_parameter", "after: is no job's id", "after")
    return job_id


def is_id(text: str) -> bool:
    """Whether it may be the id of a job; PostgreSQL takes no null byte in a text."""
    return 0 < len(text) <= _LONGEST_ID and text.isascii() and text.isprintable()


def _download(store: Store, job_id: str, outcome: Outcome) -> StreamingResponse:
    # Before the answer begins: an unknown job is a 404, and a purged one a 410.
    found = store.jobs.get(checked_id(job_id))
    if found.purged_at is not None:
        raise PurgedJobError(job_id, found.purged_at)
    headers = {
        "Nightjar-Job-State": found.state.value,
        "Nightjar-Job-Complete": "true" if found.is_over else "false",
    }
    records = store.results.iterate_raw(job_id, outcome=outcome)
    return JsonLines(json_pieces(records), headers=headers)

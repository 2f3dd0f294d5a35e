"""Reports of jobs over HTTP: as JSON, and as a page that is whole in itself."""

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse

from nightjar.jobs.api import examples
from nightjar.jobs.api.caller import Reader
from nightjar.jobs.api.documenting import JobId, documented, errors, example_content
from nightjar.jobs.api.report_schemas import JobReportPayload
from nightjar.jobs.api.results import checked_id
from nightjar.jobs.report.page import ReportContext, render_report, report_json
from nightjar.jobs.store import Store

MOST_MICRO_BATCHES = 20_000
"""A report of the API reads no more, and says so; `nightjar report --database` reads all."""
# The page holds texts of others. Beside its own policy it gets no origin.
_HEADERS = {
    "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def reports_router(store: Store) -> APIRouter:
    """What became of a job, and what it cost."""
    router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["results"])

    @router.get(
        "/report",
        response_model=JobReportPayload,
        responses=documented(examples.JOB_REPORT, 404),
    )
    def report_job(job_id: JobId, _: Reader) -> JSONResponse:
        """Timeline, lengths, failures by reason, and the bill of a job, as far as it has come."""
        report = store.reports.of_job(checked_id(job_id), MOST_MICRO_BATCHES)
        return JSONResponse(report_json(report, ReportContext(job_id)))

    @router.get(
        "/report.html",
        response_class=HTMLResponse,
        responses={
            200: {"content": example_content("<!doctype html>", "text/html")},
            **errors(404),
        },
    )
    def show_report(job_id: JobId, _: Reader) -> HTMLResponse:
        """The same as a page that loads nothing from elsewhere."""
        report = store.reports.of_job(checked_id(job_id), MOST_MICRO_BATCHES)
        return HTMLResponse(render_report(report, ReportContext(job_id)), headers=_HEADERS)

    return router

"""One job: how far it is, its figures, failures and results, and what can be done with it."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Form, Query, Request
from fastapi.responses import RedirectResponse
from starlette.responses import Response

from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.caller import Reader, Submitter
from nightjar.jobs.api.page import answers, cookies, figures
from nightjar.jobs.api.page.actions import ACTIONS, NOTICES, Act, Action, check_possible
from nightjar.jobs.api.page.questions import about_job, ask, check_form
from nightjar.jobs.api.page.rendering import fragment, html, page
from nightjar.jobs.api.page.streams import Streams
from nightjar.jobs.api.page.views import JobView
from nightjar.jobs.api.results import MAX_AFTER
from nightjar.jobs.errors import PurgedJobError
from nightjar.jobs.store import Store
from nightjar.jobs.store.result_rows import Outcome
from nightjar.jobs.store.waiting import Waiting

RESULTS_A_PAGE = 20
FAILURES_A_PAGE = 50
PAGE_BYTES = 512 * 1024
FromRow = Annotated[int, Query(ge=0, le=MAX_AFTER, alias="from")]


class JobPages:
    """Reads what the pages of one job show."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def look(self, job_id: str) -> dict[str, Any]:
        """The job, its stages, its speed, and what it waits for."""
        job = self._store.jobs.get(job_id)
        stages = figures.stage_view(job, self._store.figures.stages(job_id))
        waits = not job.is_over and not stages.computing
        return {
            "view": JobView(job, self._store.figures.rates([job]).get(job_id)),
            "stages": stages,
            "waiting": self._store.jobs.waiting_for(job_id) if waits else Waiting(),
        }

    def charts(self, job_id: str) -> dict[str, Any]:
        """Speed and lengths."""
        job = self._store.jobs.get(job_id)
        if job.purged_at is not None:
            raise PurgedJobError(job_id, job.purged_at)
        counts = self._store.figures.stages(job_id).counts
        sample = self._store.figures.lengths(job_id, job.total)
        speed = figures.speed(job, self._store.figures.landed(job_id))
        return {
            "view": JobView(job),
            "speed": speed,
            "lengths": figures.lengths(sample, [one.bucket for one in counts]),
            "sample": sample,
        }

    def results(self, job_id: str, after: int, outcome: Outcome) -> dict[str, Any]:
        """A page of landed rows, and the index that the next page begins behind."""
        read = self._store.results.read(
            job_id,
            after_index=after,
            limit=RESULTS_A_PAGE + 1,
            outcome=outcome,
            max_bytes=PAGE_BYTES,
        )
        records = read[:RESULTS_A_PAGE]
        asked = self._store.previews.asked([one.id for one in records])
        rows = [answers.shown(one, asked.get(one.id)) for one in records]
        # Bytes may have cut the page short; then there may be more, too.
        last = records[-1].index if records else after
        more = len(read) > len(records) or bool(
            records and self._store.results.read(job_id, after_index=last, limit=1, outcome=outcome)
        )
        return {"rows": rows, "table": answers.table(rows), "next_after": last if more else None}


def job_router(store: Store, streams: Streams) -> APIRouter:
    """The pages of one job that only read."""
    router, pages = APIRouter(prefix="/jobs/{job_id}"), JobPages(store)

    @router.get("")
    def job(request: Request, job_id: str, _: Reader, done: str = "") -> Response:
        values: dict[str, Any] = {**pages.look(job_id), "notice": NOTICES.get(done)}
        return page(request, "job.html", **values, tab="overview")

    @router.get("/events")
    def live_job(request: Request, job_id: str, _: Reader) -> Response:
        return streams.answer(
            request,
            lambda: pages.look(job_id),
            lambda seen: fragment("_job.html", **seen),
        )

    @router.get("/figures")
    def job_figures(request: Request, job_id: str, _: Reader) -> Response:
        return html(request, fragment("_figures.html", **pages.charts(job_id)))

    @router.get("/results")
    def results(
        request: Request,
        job_id: str,
        _: Reader,
        first: FromRow = 0,
        outcome: Outcome = "all",
    ) -> Response:
        view = JobView(store.jobs.get(job_id))
        found = pages.results(job_id, first - 1, outcome)
        values: dict[str, Any] = {**found, "view": view, "outcome": outcome, "first": first}
        return page(request, "results.html", **values, tab="results")

    @router.get("/failures")
    def failures(
        request: Request, job_id: str, _: Reader, code: str = "", first: FromRow = 0
    ) -> Response:
        view = JobView(store.jobs.get(job_id))
        if view.job.purged_at is not None:
            raise PurgedJobError(job_id, view.job.purged_at)
        found = store.failures.reasons(job_id)
        code = code or (found.reasons[0].code if found.reasons else "")
        code = code.replace("\0", "�")
        rows, next_after = store.failures.rows(job_id, code, after=first - 1, limit=FAILURES_A_PAGE)
        values: dict[str, Any] = {
            "failures": found,
            "code": code,
            "rows": rows,
            "next_after": next_after,
        }
        return page(request, "failures.html", **values, view=view, first=first, tab="failures")

    return router


def acting_router(store: Store, wake: Callable[[str], str | None]) -> APIRouter:
    """What can be done with a job: first a question, then the act."""
    router, act = APIRouter(prefix="/jobs/{job_id}"), Act(store, wake)

    @router.get("/confirm/{action}")
    def confirm(request: Request, job_id: str, action: str, _: Submitter) -> Response:
        """Ask whether it shall be done."""
        view, asked = JobView(store.jobs.get(job_id)), _known(action)
        check_possible(view, action)
        return ask(request, about_job(view, action, asked))

    @router.post("/{action}")
    def do(
        request: Request,
        job_id: str,
        action: str,
        _: Submitter,
        token: Annotated[str, Form(max_length=200)] = "",
    ) -> Response:
        """Do it, and show the job again."""
        _known(action)
        check_form(request, token)
        done = act(job_id, action)
        return RedirectResponse(f"{cookies.PLACE}/jobs/{job_id}?done={done}", 303)

    return router


def _known(action: str) -> Action:
    if action not in ACTIONS:
        raise RefusedRequestError(404, "unknown_action", "there is no such action")
    return ACTIONS[action]

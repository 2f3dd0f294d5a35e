"""The list of jobs, one job, its results and failures; and what can be done with it."""

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from nightjar.jobs.api.body import RefusedRequestError
from nightjar.jobs.api.caller import Caller, Reader
from nightjar.jobs.api.page.rendering import fragment, is_operator, page
from nightjar.jobs.api.page.streams import Streams
from nightjar.jobs.api.page.views import GROUP_LABELS, STATE_GROUPS, JobView
from nightjar.jobs.api.results import checked_after
from nightjar.jobs.errors import AccountError
from nightjar.jobs.overview_records import JobFilter
from nightjar.jobs.store import Store

JOBS_A_PAGE = 50
_LONGEST_TEXT = 200
Text = Annotated[str, Query(max_length=_LONGEST_TEXT)]


class JobsPages:
    """The list of jobs: a filter, a page of rows, and where the next page begins."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def filter(self, caller: Caller, status: str, model: str, q: str, tenant: str) -> JobFilter:
        """The filter of a query; raises RefusedRequestError.

        Only whoever runs the deployment may ask for another tenant.
        """
        if status and status not in STATE_GROUPS:
            raise RefusedRequestError(400, "invalid_parameter", "there is no such state", "status")
        if tenant and tenant != caller.tenant:
            if not is_operator(caller):
                raise RefusedRequestError(404, "unknown_tenant", "there is no such tenant")
            try:
                self._store.accounts.tenant(tenant)
            except AccountError as error:
                raise RefusedRequestError(
                    404, "unknown_tenant", "there is no such tenant"
                ) from error
        # What neither database can hold finds nothing.
        model, q = model.replace("\0", "�").strip(), q.replace("\0", "�").strip()
        return JobFilter(tenant or caller.tenant, STATE_GROUPS.get(status, ()), model, q)

    def look(self, wanted: JobFilter, after: str | None) -> dict[str, Any]:
        """A page of jobs with their speeds."""
        found = self._store.listing.page(wanted, after=after, limit=JOBS_A_PAGE)
        rates = self._store.figures.rates(found.jobs)
        return {
            "jobs": [JobView(one, rates.get(one.id)) for one in found.jobs],
            "next_after": found.next_after,
            "searched": found.searched,
        }

    def choices(self, caller: Caller) -> dict[str, list[str]]:
        """What the filter offers: models, and tenants for whoever runs the deployment."""
        models = [one.name for one in self._store.models.known()]
        tenants = (
            [one.name for one in self._store.accounts.tenants()] if is_operator(caller) else []
        )
        return {"models": models, "tenants": tenants}


def jobs_router(store: Store, streams: Streams) -> APIRouter:
    """The list of jobs, and its live rows."""
    router, pages = APIRouter(), JobsPages(store)

    @router.get("/")
    def jobs(
        request: Request,
        caller: Reader,
        status: Text = "",
        model: Text = "",
        q: Text = "",
        tenant: Text = "",
        after: Text = "",
    ) -> Response:
        wanted = pages.filter(caller, status, model, q, tenant)
        query = {"status": status, "model": model, "q": q, "tenant": tenant}
        asked = {name: value for name, value in query.items() if value}
        values = {
            **pages.look(wanted, checked_after(after or None)),
            **pages.choices(caller),
            **query,
            "groups": GROUP_LABELS,
            "query": urlencode(asked),
            "asked": asked,
            "after": after,
            "shown_tenant": wanted.tenant,
            "is_own": wanted.tenant == caller.tenant,
        }
        return page(request, "jobs.html", **values)

    @router.get("/jobs")
    def jobs_of_old(caller: Reader) -> Response:
        return RedirectResponse("/ui/", 303)

    @router.get("/events")
    def live_jobs(
        request: Request,
        caller: Reader,
        status: Text = "",
        model: Text = "",
        q: Text = "",
        tenant: Text = "",
        after: Text = "",
    ) -> Response:
        wanted, behind = (
            pages.filter(caller, status, model, q, tenant),
            checked_after(after or None),
        )
        own = {"is_own": wanted.tenant == caller.tenant}
        return streams.answer(
            request,
            lambda: pages.look(wanted, behind),
            lambda seen: fragment("_jobs.html", **seen, **own),
        )

    return router

"""The web page under `/ui`: an application of its own within that of the API.

It reads the store as the API does, and shows it as HTML. Everything that the browser loads comes
from here. The page needs no build step and no other host.
"""

from collections.abc import Callable

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from nightjar.jobs.api.key_ring import KeyRing
from nightjar.jobs.api.ownership import Ownership
from nightjar.jobs.api.page import assets
from nightjar.jobs.api.page.deployment_pages import deployment_router
from nightjar.jobs.api.page.errors import (
    show_bad_parameter,
    show_error,
    show_fault,
    show_http_error,
)
from nightjar.jobs.api.page.gate import PageGate
from nightjar.jobs.api.page.job_pages import acting_router, job_router
from nightjar.jobs.api.page.jobs_pages import jobs_router
from nightjar.jobs.api.page.schedule_pages import schedule_acting_router, schedule_router
from nightjar.jobs.api.page.signing import signing_router
from nightjar.jobs.api.page.streams import Streams
from nightjar.jobs.errors import JobError
from nightjar.jobs.store import Store


def create_page(
    store: Store, keys: KeyRing, gate: PageGate, wake: Callable[[str], str | None]
) -> FastAPI:
    """The application that is mounted at `/ui`.

    `wake` tells the planner of a job that has work again. `app.state.streams` are the open streams;
    whoever runs the server tells them when it ends.
    """
    app = FastAPI(
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(Ownership(store.jobs))],
    )
    app.state.streams = streams = Streams(gate)
    for router in (
        jobs_router(store, streams),
        job_router(store, streams),
        acting_router(store, wake),
        deployment_router(store, streams),
        schedule_router(store, streams),
        schedule_acting_router(store),
        signing_router(keys, store.sessions),
    ):
        app.include_router(router)

    @app.get("/static/{version}/{name:path}")
    async def static(request: Request, version: str, name: str) -> Response:
        return assets.serve(request, name, version)

    for kind, answer in _ERRORS.items():
        app.add_exception_handler(kind, answer)
    return app


_ERRORS = {
    JobError: show_error,
    RequestValidationError: show_bad_parameter,
    HTTPException: show_http_error,
    Exception: show_fault,
}

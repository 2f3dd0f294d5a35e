"""The HTTP API over the store: submit a job, follow it, steer it, fetch its results.

Endpoints that ask the store are plain functions: FastAPI runs them in threads,
so that a slow database never stops the event loop.
"""

from collections.abc import Callable, Collection

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse

import nightjar
from nightjar.jobs.api.body import UploadLimits
from nightjar.jobs.api.call_routes import calls_router
from nightjar.jobs.api.calls import Calls, CallSettings
from nightjar.jobs.api.errors import answer_bad_parameter, answer_error
from nightjar.jobs.api.forwarding import UploadForwarder, UploadTaker
from nightjar.jobs.api.guard import BrowserGuard
from nightjar.jobs.api.health import Deployment, health_router
from nightjar.jobs.api.jobs import following_router, jobs_router
from nightjar.jobs.api.results import results_router
from nightjar.jobs.api.upload import Uploads
from nightjar.jobs.errors import JobError
from nightjar.jobs.store import Store

# FastAPI's own page loads a script from the internet, and is blank without it.
DOCS = """<!doctype html><html lang="en"><title>Nightjar's API</title>
<p>The description of this API is <a href="openapi.json">openapi.json</a>, in OpenAPI's format.
Any viewer of that format shows it.</p></html>
"""


def create_app(  # noqa: PLR0913 - the parts of one application
    store: Store,
    wake: Callable[[str], None],
    *,
    served_model: str | None = None,
    limits: UploadLimits | None = None,
    taker: UploadTaker | None = None,
    deployment: Deployment | None = None,
    trusted_hosts: Collection[str] = (),
    calls: CallSettings | None = None,
) -> FastAPI:
    """The application over a store whose tables exist.

    `wake` tells the planner of a new job's id; it may fail, then the job waits
    for the planner's own rounds. `served_model` is the model of jobs that name
    none in `?model=`, and the only one that may be named; None accepts any.
    `taker` is another process with this application that takes the uploads; None
    takes them here. `deployment` knows of the other processes; None says nothing of them.
    `calls` says how single calls get to the workers, and how many may wait.
    `trusted_hosts` are names under which the API is reached beside loopback and addresses.
    """
    app = FastAPI(title="Nightjar", version=nightjar.__version__, docs_url=None, redoc_url=None)
    app.add_middleware(BrowserGuard, hosts=trusted_hosts)
    limits = limits or UploadLimits()
    uploads = Uploads(store.jobs, wake, served_model, limits)
    forwarder = None if taker is None else UploadForwarder(taker, limits)
    health = health_router(store, taker, deployment)
    app.state.calls = single = Calls(store, wake, served_model, calls or CallSettings(), limits)
    routers = (jobs_router(store, uploads, forwarder), following_router(store))
    for router in (*routers, results_router(store), calls_router(single), health):
        app.include_router(router)

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(DOCS)

    app.add_exception_handler(JobError, answer_error)
    app.add_exception_handler(RequestValidationError, answer_bad_parameter)
    return app

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
from nightjar.jobs.api.errors import answer_bad_parameter, answer_error
from nightjar.jobs.api.forwarding import UploadForwarder, UploadTaker
from nightjar.jobs.api.guard import BrowserGuard
from nightjar.jobs.api.health import Deployment, health_router
from nightjar.jobs.api.jobs import following_router, jobs_router
from nightjar.jobs.api.model_names import ConfiguredModels, ModelNames
from nightjar.jobs.api.models import models_router
from nightjar.jobs.api.results import results_router
from nightjar.jobs.api.upload import Uploads
from nightjar.jobs.errors import JobError
from nightjar.jobs.store import Store

# FastAPI's own page loads a script from the internet, and is blank without it.
DOCS = """<!doctype html><html lang="en"><title>Nightjar's API</title>
<p>The description of this API is <a href="openapi.json">openapi.json</a>, in OpenAPI's format.
Any viewer of that format shows it.</p></html>
"""


def create_app(
    store: Store,
    wake: Callable[[str], None],
    *,
    served_model: str | ConfiguredModels | None = None,
    limits: UploadLimits | None = None,
    taker: UploadTaker | None = None,
    deployment: Deployment | None = None,
    trusted_hosts: Collection[str] = (),
) -> FastAPI:
    """The application over a store whose tables exist.

    `wake` tells the planner of a new job's id; it may fail, then the job waits
    for the planner's own rounds. `served_model` is the name of the model that is
    served, or what the settings say of several: jobs may name it before a planner has
    said what it plans for (jobs/api/model_names.py).
    `taker` is another process with this application that takes the uploads; None
    takes them here. `deployment` knows of the other processes; None says nothing of them.
    `trusted_hosts` are names under which the API is reached beside loopback and addresses.
    """
    app = FastAPI(title="Nightjar", version=nightjar.__version__, docs_url=None, redoc_url=None)
    app.add_middleware(BrowserGuard, hosts=trusted_hosts)
    limits = limits or UploadLimits()
    if isinstance(served_model, str):
        served_model = ConfiguredModels((served_model,))
    names = ModelNames(store.models, served_model or ConfiguredModels())
    uploads = Uploads(store.jobs, wake, names, limits)
    forwarder = None if taker is None else UploadForwarder(taker, limits)
    health = health_router(store, taker, deployment)
    routers = (jobs_router(store, uploads, forwarder), following_router(store))
    models = models_router(store.models, names)
    for router in (*routers, results_router(store), models, health):
        app.include_router(router)

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(DOCS)

    app.add_exception_handler(JobError, answer_error)
    app.add_exception_handler(RequestValidationError, answer_bad_parameter)
    return app

"""The HTTP API over the store: submit a job, follow it, steer it, fetch its results.

Endpoints that ask the store are plain functions: FastAPI runs them in threads,
so that a slow database never stops the event loop.
"""

from collections.abc import Callable, Collection
from functools import cache

from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

import nightjar
from nightjar.jobs.api import openai_schemas, report_schemas, schedule_schemas, schemas
from nightjar.jobs.api.authentication import Authentication, reading_check
from nightjar.jobs.api.batches import batches_router
from nightjar.jobs.api.body import UploadLimits
from nightjar.jobs.api.call_routes import calls_router
from nightjar.jobs.api.calls import Calls, CallSettings
from nightjar.jobs.api.clear_headers import ClearHeaders
from nightjar.jobs.api.documenting import EVERYWHERE, describe_late
from nightjar.jobs.api.errors import (
    answer_bad_parameter,
    answer_error,
    answer_fault,
    answer_http_error,
)
from nightjar.jobs.api.file_uploads import FileUploads
from nightjar.jobs.api.files import files_router, uploading_router
from nightjar.jobs.api.forwarding import UploadForwarder, UploadTaker
from nightjar.jobs.api.guard import BrowserGuard
from nightjar.jobs.api.health import Deployment, health_router
from nightjar.jobs.api.jobs import following_router, steering_router, submitting_router
from nightjar.jobs.api.key_ring import Access, KeyRing
from nightjar.jobs.api.model_names import ModelNames
from nightjar.jobs.api.models import models_router
from nightjar.jobs.api.observing import Observe, Observing, ReadMetrics, metrics_router, no_metrics
from nightjar.jobs.api.open_jobs import open_jobs_router
from nightjar.jobs.api.openapi import describe_events, openapi_document, operation_id
from nightjar.jobs.api.ownership import Ownership
from nightjar.jobs.api.page import create_page
from nightjar.jobs.api.page.api_docs import show_docs
from nightjar.jobs.api.page.gate import PageGate, ToThePage
from nightjar.jobs.api.places import UploadPlaces
from nightjar.jobs.api.rate_limits import RateLimits
from nightjar.jobs.api.reports import reports_router
from nightjar.jobs.api.results import results_router
from nightjar.jobs.api.schedules import acting_router, schedules_router, watching_router
from nightjar.jobs.api.upload import Uploads
from nightjar.jobs.api.webhooks import deliveries_router, making_router, webhooks_router
from nightjar.jobs.errors import JobError
from nightjar.jobs.model_choice import ConfiguredModels
from nightjar.jobs.store import Store
from nightjar.jobs.webhooks.addresses import AddressGuard

describe_late(openai_schemas, report_schemas, schedule_schemas, schemas)


def create_app(  # noqa: PLR0913 - the parts of one application
    store: Store,
    wake: Callable[[str], None],
    *,
    served_model: str | ConfiguredModels | None = None,
    limits: UploadLimits | None = None,
    taker: UploadTaker | None = None,
    deployment: Deployment | None = None,
    trusted_hosts: Collection[str] = (),
    calls: CallSettings | None = None,
    access: Access | None = None,
    guard: AddressGuard | None = None,
    observe: Observe | None = None,
    metrics: ReadMetrics = no_metrics,
) -> FastAPI:
    """The application over a store whose tables exist.

    `wake` tells the planner of a new job's id; it may fail, then the job waits
    for the planner's own rounds. `served_model` is the name of the model that is
    served, or what the settings say of several: jobs may name it before a planner has
    said what it plans for (jobs/api/model_names.py).
    `taker` is another process with this application that takes the uploads; None
    takes them here. `deployment` knows of the other processes; None says nothing of them.
    `calls` says how single calls get to the workers, and how many may wait.
    `trusted_hosts` are names under which the API is reached beside loopback and addresses.
    `access` says who may call; None needs a key only if one was ever made.
    `guard` says which addresses a webhook may have; by default public ones.
    `observe` is told how long each answer took; `metrics` gives what `GET /metrics` shows.
    """
    app = _app_without_routes(store)
    access = access or Access()
    keys = KeyRing(store.accounts, access)
    gate = PageGate(keys, store.sessions)
    rates = RateLimits() if access.counts else None
    app.add_middleware(Authentication, keys=keys, rates=rates, door=gate)
    _add_middleware(app, trusted_hosts, observe)
    limits = limits or UploadLimits()
    if isinstance(served_model, str):
        served_model = ConfiguredModels((served_model,))
    names = ModelNames(store.models, served_model or ConfiguredModels())
    app.state.calls = Calls(store, wake, names, calls or CallSettings(), limits)
    places = UploadPlaces(limits)
    uploads = Uploads(store.jobs, wake, names, limits, places)
    file_uploads = FileUploads(store.files, limits, places)
    forwarder = None if taker is None else UploadForwarder(taker, limits)
    for router in (
        *_routers_of_rows(store, uploads, file_uploads, forwarder, limits),
        batches_router(store, uploads.try_to_wake, names, limits),
        calls_router(app.state.calls),
        models_router(store.models, names),
        watching_router(store),
        schedules_router(store, names),
        acting_router(store),
        making_router(store, guard or AddressGuard()),
        webhooks_router(store),
        deliveries_router(store),
        metrics_router(metrics),
    ):
        app.include_router(router, responses=EVERYWHERE)
    app.include_router(health_router(store, taker, deployment, reading_check(keys)))
    describe_events(app)
    _show_documents(app)
    app.state.page = create_page(store, keys, gate, uploads.try_to_wake)
    app.mount("/ui", app.state.page)
    return app


def _app_without_routes(store: Store) -> FastAPI:
    """An application that answers errors, and gives a caller its own jobs alone."""
    app = FastAPI(
        title="Nightjar",
        version=nightjar.__version__,
        openapi_url=None,  # see _show_documents
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=operation_id,
        dependencies=[Depends(Ownership(store.jobs))],
    )
    for kind, answer in _ERRORS.items():
        app.add_exception_handler(kind, answer)
    return app


def _add_middleware(app: FastAPI, hosts: Collection[str], observe: Observe | None) -> None:
    """What stands before authentication. The last one added comes first."""
    app.add_middleware(ToThePage)
    app.add_middleware(BrowserGuard, hosts=hosts)
    app.add_middleware(ClearHeaders)
    if observe is not None:
        app.add_middleware(Observing, observe=observe)


def _routers_of_rows(
    store: Store,
    uploads: Uploads,
    file_uploads: FileUploads,
    forwarder: UploadForwarder | None,
    limits: UploadLimits,
) -> tuple[APIRouter, ...]:
    """Jobs, their results, and files: where rows go in and out."""
    return (
        submitting_router(uploads, forwarder),
        open_jobs_router(store, uploads, limits),
        steering_router(store, uploads),
        following_router(store),
        results_router(store),
        reports_router(store),
        uploading_router(file_uploads, forwarder),
        files_router(store),
    )


_ERRORS = {
    JobError: answer_error,
    RequestValidationError: answer_bad_parameter,
    HTTPException: answer_http_error,
    Exception: answer_fault,
}


def _show_documents(app: FastAPI) -> None:
    document = cache(lambda: openapi_document(app))  # it takes a third of a second to make

    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> JSONResponse:
        return JSONResponse(document())

    # FastAPI's own page loads a script from the internet, and is blank without it.
    app.add_api_route("/docs", show_docs, include_in_schema=False)

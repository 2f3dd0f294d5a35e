"""Serves the HTTP API of jobs/ and gives it the call that wakes the planner.

A second process takes the uploads: `python -m nightjar.pipeline.front.api_server SOCKET PARENT`. So
a status poll waits neither for Python's lock nor for a core while a million rows are read.
"""

import logging
import signal
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import uvicorn
from celery import Celery
from fastapi import FastAPI
from starlette.middleware import Middleware

from nightjar import logs
from nightjar.children import die_with_parent
from nightjar.jobs.api import create_app
from nightjar.jobs.api.body import UploadLimits
from nightjar.jobs.api.calls import CallPath, CallSettings
from nightjar.jobs.api.forwarding import UploadTaker
from nightjar.jobs.api.health import Deployment
from nightjar.jobs.api.key_ring import Access
from nightjar.jobs.api.observing import no_metrics
from nightjar.jobs.model_choice import ConfiguredModels
from nightjar.jobs.store import Store
from nightjar.jobs.webhooks.addresses import AddressGuard
from nightjar.pipeline.front.api_metrics import (
    ApiMetrics,
    Monitoring,
    observe_request,
    observe_upload,
    own_metrics,
)
from nightjar.pipeline.front.api_traces import Tracing
from nightjar.pipeline.front.http_protocol import ApiProtocol, UploadProtocol
from nightjar.pipeline.front.signs import BROKER_TIMEOUT_S, Signs
from nightjar.pipeline.front.upload_process import UploadProcess
from nightjar.pipeline.metrics import declarations as declared
from nightjar.pipeline.metrics.recording import recorder
from nightjar.pipeline.planning.calls import CallPlanner
from nightjar.pipeline.planning.models import PlanningModels
from nightjar.pipeline.queue.celery_app import PLAN_TASK, create_celery_app
from nightjar.pipeline.queue.dispatcher import publish
from nightjar.pipeline.queue.opening import open_store
from nightjar.pipeline.queue.waking import send_wake
from nightjar.pipeline.settings import Settings
from nightjar.pipeline.tracing.tracer import traces
from nightjar.process import spare_what_stays, step_back, switch_threads_often


def serve(settings: Settings, host: str, port: int) -> None:
    """Answer HTTP until the process is told to end."""
    logs.configure()
    logs.name_process(declared.API)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs addresses, with jobs' metadata
    switch_threads_often()  # a status poll waits for no thread that writes a page of results
    ending = _Ending()
    # The store is closed last: closing the last connection merges SQLite's log.
    with _store(settings) as store, UploadProcess() as uploads:
        celery = _celery(settings)
        dead_after_s = settings.worker_dead_after_s
        signs = Signs(store, celery, dead_after_s=dead_after_s)
        access = _access(settings, required=not is_loopback(host))
        path = _call_path(settings, store, celery)
        traces.open(settings, declared.API)
        metrics = ApiMetrics(store, signs, uploads.socket, uploads.trouble)
        monitoring = Monitoring(observe_request, metrics.read)
        app = application(
            settings, store, celery, access, uploads, signs, path, monitoring=monitoring
        )
        spare_what_stays()
        with signs:
            config = uvicorn.Config(
                app,
                host,
                port,
                http=ApiProtocol,
                ws="none",
                log_config=None,  # its records go where ours go
                log_level="info",
                access_log=False,
            )
            server = uvicorn.Server(config)
            app.state.calls.watcher.is_ending = lambda: server.should_exit
            app.state.page.state.streams.is_ending = lambda: server.should_exit
            ending.run(server)


def serve_uploads(settings: Settings, socket: Path) -> None:
    """Take uploads through a unix socket until the process is told to end."""
    ending = _Ending()
    logs.configure()
    logs.name_process(declared.UPLOADS)
    # It warns of each form that is none; the sender is told.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    step_back(settings.worker_niceness)
    with _store(settings) as store:
        access = replace(_access(settings), counts=False)  # the API has counted the request
        traces.open(settings, declared.UPLOADS)
        recorder.open(declared.UPLOADS)
        monitoring = Monitoring(observe_upload, own_metrics)
        app = application(settings, store, _celery(settings), access, monitoring=monitoring)
        spare_what_stays()
        config = uvicorn.Config(
            app,
            uds=str(socket),
            http=UploadProtocol,
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
        )
        ending.run(uvicorn.Server(config))


class _Ending:
    """Lets SIGTERM end the process through its `with` blocks, which close the database.

    The signal only sets a flag, also before the server runs. An exception would come up wherever
    the process is at that moment. Pydantic and garbage collections drop exceptions at some places,
    and then the process would never end.
    """

    def __init__(self) -> None:
        self._asked = False
        self._server: uvicorn.Server | None = None
        # Uvicorn ends in order and then raises the signal again, for the handler before its own.
        signal.signal(signal.SIGTERM, self._ask)

    def run(self, server: uvicorn.Server) -> None:
        """Run the server until the process is told to end; not at all if it has been."""
        self._server = server
        if not self._asked:
            server.run()

    def _ask(self, *_: object) -> None:
        self._asked = True
        if self._server is not None:
            self._server.should_exit = True


def _store(settings: Settings) -> closing[Store]:
    return closing(open_store(settings))


def _celery(settings: Settings) -> Celery:
    celery = create_celery_app(settings)
    # A broker that is down costs the caller little time: the job is in SQL, and beat finds it.
    # Without `max_retries` kombu tries to connect for seconds, whatever `retry` says. The timeout
    # for a silent broker is shorter than a worker's.
    celery.conf.broker_transport_options = celery.conf.broker_transport_options | {
        "max_retries": 0,
        "socket_timeout": BROKER_TIMEOUT_S,
    }
    return celery


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on the interface `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _access(settings: Settings, *, required: bool = False) -> Access:
    secret = settings.api_key
    return Access(None if secret is None else secret.get_secret_value(), required)


def application(  # noqa: PLR0913 - the parts of one application
    settings: Settings,
    store: Store,
    celery: Celery,
    access: Access,
    taker: UploadTaker | None = None,
    deployment: Deployment | None = None,
    call_path: CallPath | None = None,
    *,
    monitoring: Monitoring | None = None,
) -> FastAPI:
    """The API as these settings ask for it."""

    def wake(job_id: str) -> None:
        send_wake(celery, PLAN_TASK, args=[job_id], retry=False)

    app = create_app(
        store,
        wake,
        served_model=ConfiguredModels(tuple(settings.model_paths), settings.accept_any_model),
        limits=UploadLimits(
            settings.max_upload_bytes,
            settings.upload_stalled_after_s,
            settings.upload_least_bytes_per_s,
            settings.upload_deadline_s,
            settings.max_job_rows,
            settings.max_rejected_lines,
            file_lifetime_s=settings.file_lifetime_s,
            may_store=partial(store.quotas.may_store, stored=store.files.stored_bytes),
        ),
        taker=taker,
        deployment=deployment,
        trusted_hosts=settings.trusted_host_list,
        calls=CallSettings(settings.live_calls, settings.live_timeout_s, call_path),
        access=access,
        guard=AddressGuard(allow_private=settings.webhook_allow_private),
        observe=None if monitoring is None else monitoring.observe,
        metrics=no_metrics if monitoring is None else monitoring.read,
    )
    if traces.is_on:
        app.user_middleware.append(Middleware(Tracing, traces=traces))  # the innermost
    return app


def _call_path(settings: Settings, store: Store, celery: Celery) -> CallPath | None:
    """The quick way of single calls; None where the API does not know the models."""
    if not settings.model_paths:
        return None
    planner = CallPlanner(settings, partial(PlanningModels.open, settings, store))
    return CallPath(planner.plan, partial(publish, celery, retry=False))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    serve_uploads(Settings.read(), Path(sys.argv[1]))

"""Serves the HTTP API of jobs/ and gives it the call that wakes the planner."""

import sys

import uvicorn

from nightjar import logs
from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.api import create_app
from nightjar.jobs.store import Store
from nightjar.pipeline.celery_app import PLAN_TASK, create_celery_app
from nightjar.pipeline.settings import Settings
from nightjar.process import spare_what_stays

# A thread that parses an upload keeps the interpreter for so long at a time. A status poll takes it
# up a dozen times on its way through event loop, thread and database, so that Python's own 5 ms a
# time would be most of what its caller waits for.
SWITCH_EVERY_S = 0.0005


def serve(settings: Settings, host: str, port: int) -> None:
    """Answer HTTP until the process is told to end."""
    logs.configure()
    store = Store(settings.database_url.get_secret_value())
    celery = create_celery_app(settings)
    # A broker that is down costs the caller little: the job is in SQL, beat finds it. Without
    # `max_retries` kombu goes on trying to connect for seconds, whatever `retry` says.
    celery.conf.broker_transport_options = settings.broker_transport_options | {"max_retries": 0}

    def wake(job_id: str) -> None:
        celery.send_task(PLAN_TASK, args=[job_id], retry=False)

    served = settings.model_name
    if served is None and settings.model is not None:
        served = ModelDirectory.open(settings.model).name
    app = create_app(store, wake, served_model=served, max_upload_bytes=settings.max_upload_bytes)
    spare_what_stays()
    sys.setswitchinterval(SWITCH_EVERY_S)
    try:
        uvicorn.run(app, host=host, port=port, log_level="info", access_log=False)
    finally:
        store.close()

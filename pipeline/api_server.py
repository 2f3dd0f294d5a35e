"""Serves the HTTP API of jobs/ and gives it the call that wakes the planner.

Uploads are taken by a second process, `python -m nightjar.pipeline.api_server SOCKET`, so that a
status poll waits neither for Python's lock nor for a core behind the reading of a million rows.
"""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import TracebackType

import uvicorn
from celery import Celery
from fastapi import FastAPI

from nightjar import logs
from nightjar.checkpoints import ModelDirectory
from nightjar.jobs.api import create_app
from nightjar.jobs.api.body import UploadLimits
from nightjar.jobs.api.forwarding import START_S, UploadTaker
from nightjar.jobs.api.health import Deployment
from nightjar.jobs.store import Store
from nightjar.pipeline.celery_app import PLAN_TASK, create_celery_app
from nightjar.pipeline.embedded.processes import private_directory
from nightjar.pipeline.settings import Settings
from nightjar.pipeline.signs import BROKER_TIMEOUT_S, Signs
from nightjar.pipeline.waking import send_wake
from nightjar.process import die_with_parent, spare_what_stays, step_back

logger = logging.getLogger(__name__)

# A thread that writes a page of results keeps the interpreter for so long at a time. A status poll
# takes it up a dozen times on its way through event loop, thread and database, so that Python's own
# 5 ms a time would be most of what its caller waits for.
SWITCH_EVERY_S = 0.0005
_RESTART_S = 1.0
_SHORT_LIVES = 2  # so many in a row, and it is said not to start


def serve(settings: Settings, host: str, port: int) -> None:
    """Answer HTTP until the process is told to end."""
    logs.configure()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs addresses, with jobs' metadata
    sys.setswitchinterval(SWITCH_EVERY_S)
    _end_in_order()
    # The store is closed last: SQLite's log is merged by whoever closes the last connection.
    with _store(settings) as store, UploadProcess() as uploads:
        celery = _celery(settings)
        dead_after_s = settings.worker_dead_after_s
        signs = Signs(store, celery, dead_after_s=dead_after_s)
        app = _application(settings, store, celery, uploads, signs)
        spare_what_stays()
        with signs:
            uvicorn.run(app, host=host, port=port, log_level="info", access_log=False)


def serve_uploads(settings: Settings, socket: Path) -> None:
    """Take uploads through a unix socket until the process is told to end."""
    logs.configure()
    step_back(settings.worker_niceness)
    _end_in_order()
    with _store(settings) as store:
        app = _application(settings, store, _celery(settings), None, None)
        spare_what_stays()
        uvicorn.run(app, uds=str(socket), log_level="warning", access_log=False)


def _end_in_order() -> None:
    """Let SIGTERM end the process by way of its `with` blocks, which close the database."""
    # Uvicorn ends in order and then raises the signal again, for whoever was there before it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


class UploadProcess:
    """Takes uploads at `socket` while the block lasts; started again when it ends before."""

    def __init__(self) -> None:
        self._directory = private_directory()
        self.socket = self._directory / "uploads.sock"
        self.ends = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = time.monotonic()
        self._short_lives = 0  # in a row
        self._last_end = ""
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep_running, name="uploads", daemon=True)

    def __enter__(self) -> "UploadProcess":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._stopping.set()
            if self._process is not None:
                self._process.terminate()
        self._thread.join()
        shutil.rmtree(self._directory, ignore_errors=True)

    def trouble(self) -> str | None:
        """Why no upload is taken; None while one is, or may be in a moment."""
        if _listens(self.socket):
            return None
        if self._short_lives >= _SHORT_LIVES:
            return (
                f"uploads are not taken: their process ended {self._short_lives} times in a row "
                f"within {START_S:.0f} s of its start, the last time {self._last_end}; the API's "
                "log says why"
            )
        silent_s = time.monotonic() - self._started_at
        if silent_s > START_S:
            return (
                f"uploads are not taken: their process does not listen {silent_s:.0f} s after "
                "its start"
            )
        return None

    def _keep_running(self) -> None:
        while not self._stopping.is_set():
            self._last_end = self._live_once()
            self.ends += 1
            short = time.monotonic() - self._started_at < START_S
            self._short_lives = self._short_lives + 1 if short else 0
            if not self._stopping.is_set():
                logger.error(
                    "the process that takes uploads ended %s and is started again",
                    self._last_end,
                    extra={"action": "uploads_restarted"},
                )
                self._stopping.wait(_RESTART_S)

    def _live_once(self) -> str:
        """Start the process and wait for its end; returns how it ended."""
        module = "nightjar.pipeline.api_server"
        command = [sys.executable, "-m", module, str(self.socket), str(os.getpid())]
        self._started_at = time.monotonic()
        try:
            with self._lock:
                if self._stopping.is_set():
                    return "before its start"
                # A session of its own: Ctrl-C is for the API, which answers uploads to their end.
                self._process = subprocess.Popen(command, start_new_session=True)
        except OSError as error:  # no memory, no more processes: that may pass
            return f"before its start ({error})"
        return f"with status {self._process.wait()}"


def _listens(path: Path) -> bool:
    """Whether a process takes connections there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except TimeoutError:
            return True  # more wait there than it has taken yet
        except OSError:
            return False
    return True


def _store(settings: Settings) -> closing[Store]:
    return closing(Store(settings.database_url.get_secret_value()))


def _celery(settings: Settings) -> Celery:
    celery = create_celery_app(settings)
    # A broker that is down costs the caller little: the job is in SQL, beat finds it. Without
    # `max_retries` kombu goes on trying to connect for seconds, whatever `retry` says. One that is
    # silent is not waited for as long as by a worker.
    celery.conf.broker_transport_options = settings.broker_transport_options | {
        "max_retries": 0,
        "socket_timeout": BROKER_TIMEOUT_S,
    }
    return celery


def _application(
    settings: Settings,
    store: Store,
    celery: Celery,
    taker: UploadTaker | None,
    deployment: Deployment | None,
) -> FastAPI:
    def wake(job_id: str) -> None:
        send_wake(celery, PLAN_TASK, args=[job_id], retry=False)

    served = settings.model_name
    if served is None and settings.model is not None:
        served = ModelDirectory.open(settings.model).name
    return create_app(
        store,
        wake,
        served_model=served,
        limits=UploadLimits(
            settings.max_upload_bytes,
            settings.upload_stalled_after_s,
            settings.upload_least_bytes_per_s,
            settings.upload_deadline_s,
            settings.max_job_rows,
            settings.max_rejected_lines,
        ),
        taker=taker,
        deployment=deployment,
        trusted_hosts=settings.trusted_host_list,
    )


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    serve_uploads(Settings.read(), Path(sys.argv[1]))

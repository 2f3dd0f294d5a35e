"""Plain Celery as people set it up for work that must not be lost: acknowledged late, results in
SQL, one task a request.  `celery -A tests.faults.plain_app worker` is its worker.

It is given what its defaults lack: a message that nobody acknowledged comes back after 20 s, and
not after an hour.
"""

import os
import signal
import time
from hashlib import sha256
from pathlib import Path

from celery import Celery
from celery.signals import task_prerun, task_success

TASK = "plain.compute"
BACK_AFTER_S = 20
app = Celery(
    "plain", broker=os.environ.get("PLAIN_BROKER"), backend=os.environ.get("PLAIN_BACKEND")
)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_serializer="json",
    accept_content=["json"],
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_transport_options={
        "visibility_timeout": BACK_AFTER_S,
        "unacked_restore_interval": 2,
        "unacked_restore_throttle": 1,
    },
    database_create_tables_at_setup=True,
)


class PoisonError(Exception):
    """Raised for `<poison:raise>`."""


@app.task(name=TASK)
def compute(text: str, seconds: float) -> str:
    """An answer that is a function of the request, after some time; the fake engine's poisons."""
    time.sleep(seconds)
    if "<poison:raise>" in text:
        raise PoisonError(text)
    if "<poison:crash>" in text:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "<poison:memory>" in text:  # what the kernel does in the end
        os.kill(os.getpid(), signal.SIGKILL)
    while "<poison:hang>" in text:
        time.sleep(1)
    return sha256(text.encode()).hexdigest()


def _note(what: str, task_id: str) -> None:
    """One line in a file that all processes write to; a short append is never torn."""
    with Path(os.environ["PLAIN_JOURNAL"]).open("a", encoding="ascii") as journal:
        journal.write(f"{what} {task_id}\n")


@task_prerun.connect
def _began(task_id: str, **_: object) -> None:
    _note("began", task_id)


@task_success.connect
def _ended(sender: object, **_: object) -> None:
    _note("ended", sender.request.id)  # type: ignore[attr-defined]

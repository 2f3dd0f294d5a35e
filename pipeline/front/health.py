"""Checks that a process of the deployment does its work: `nightjar health PART`.

Planners and GPU workers are asked through the broker: a process that takes no messages gives no
answer. The clock writes a mark into the broker whenever it sends a tick. Task runners raise a
counter in SQL.
"""

import socket
from contextlib import closing
from enum import StrEnum

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from nightjar.jobs.errors import StoreError
from nightjar.pipeline.queue.celery_app import create_celery_app
from nightjar.pipeline.queue.commands import GPU_WORKER, PLANNER
from nightjar.pipeline.queue.liveness import is_gone
from nightjar.pipeline.queue.opening import open_store
from nightjar.pipeline.queue.waking import CLOCK_MARK, SILENT_AFTER_S
from nightjar.pipeline.settings import Settings

_ANSWER_S = 10.0


class Part(StrEnum):
    """A process whose health can be checked."""

    PLANNER = "planner"
    WORKER = "worker"
    BEAT = "beat"
    TASKS = "tasks"


_NAMES = {Part.PLANNER: PLANNER, Part.WORKER: GPU_WORKER}


def trouble(part: Part, settings: Settings) -> str | None:
    """Return why this part does not work on this machine; None where it works.

    Only planners, GPU workers and task runners with this machine's (or container's) name count.
    """
    if part is Part.TASKS:
        return _runner_trouble(settings)
    app = create_celery_app(settings)
    # As in the API: without this, kombu tries to connect for ever.
    app.conf.broker_transport_options = app.conf.broker_transport_options | {"max_retries": 0}
    try:
        return _clock_trouble(app) if part is Part.BEAT else _worker_trouble(app, _NAMES[part])
    except (OperationalError, RedisError, OSError) as error:
        return f"the broker does not answer: {error}"
    finally:
        app.close()


def _runner_trouble(settings: Settings) -> str | None:
    host = socket.gethostname()
    silent_s = max(settings.worker_dead_after_s, _ANSWER_S)
    with closing(open_store(settings)) as store:
        try:
            seen = store.task_runners.recent(silent_s)
        except StoreError as error:
            return f"the database does not answer: {error}"
    own = [one.owner for one in seen if one.owner.startswith(f"{host}:")]
    if any(not is_gone(owner) for owner in own):
        return None
    return f"no task runner of {host} has given a sign of life for {silent_s:.0f} s"


def _clock_trouble(app: Celery) -> str | None:
    with (
        app.connection_for_read() as connection,
        connection.channel() as channel,
        channel.conn_or_acquire() as client,
    ):
        marked = client.exists(CLOCK_MARK)
    return None if marked else f"the clock has sent nothing for {SILENT_AFTER_S} s"


def _worker_trouble(app: Celery, name: str) -> str | None:
    host = socket.gethostname()
    with app.connection_for_write() as connection:
        answers = app.control.broadcast(
            "ping",
            reply=True,
            limit=1,
            timeout=_ANSWER_S,
            pattern=f"{name}-*@{host}",
            matcher="glob",
            connection=connection,
        )
    if answers:
        return None
    said = "GPU worker" if name == GPU_WORKER else name
    return f"no {said} of {host} has answered within {_ANSWER_S:.0f} s"

"""The Celery application: queues, routes, the beat schedule and the settings that keep work safe.

`nightjar worker` and `nightjar beat` start Celery by name: on `nightjar.pipeline.planning.tasks`
(planner) and `nightjar.gpu_worker.worker.tasks` (compute).
"""

import logging
import time
from collections.abc import Collection
from datetime import UTC, datetime, timedelta

from celery import Celery, Task
from celery.schedules import schedule
from celery.signals import after_setup_logger, worker_ready
from kombu import Exchange, Queue

from nightjar.jobs.errors import StoreUnavailableError
from nightjar.logs import make_formatter, set_level
from nightjar.pipeline.queue import transport
from nightjar.pipeline.queue.live_lane import open_lane
from nightjar.pipeline.queue.queues import PLAN_QUEUE, compute_queues, live_queue
from nightjar.pipeline.queue.quiet_logs import QuietTicks
from nightjar.pipeline.queue.signing import Signer
from nightjar.pipeline.queue.taking import watch_worker
from nightjar.pipeline.settings import Settings

logger = logging.getLogger(__name__)

PLAN_TASK = "nightjar.plan"
TICK_TASK = "nightjar.tick"
SWEEP_TASK = "nightjar.sweep"
COMPUTE_TASK = "nightjar.compute"
# Errors of a task that are no bug of Nightjar: one line in the log, no traceback.
EXPECTED_ERRORS = (StoreUnavailableError,)
# Priorities of messages: the broker serves urgent messages first.
URGENT, ORDINARY = 0, 9


def create_celery_app(settings: Settings) -> Celery:
    """Build the application; it connects with the first message."""
    transport.install()
    after_setup_logger.connect(_write_fields)
    app = Celery("nightjar", broker=settings.broker_url.get_secret_value())
    app.conf.update(
        # SQL is the truth; the broker only carries. A task is acknowledged after its commit. Leases
        # make lost and doubled messages harmless (jobs/store).
        task_acks_late=True,
        task_acks_on_failure_or_timeout=True,
        task_reject_on_worker_lost=False,
        task_ignore_result=True,
        result_backend=None,
        worker_pool="threads",
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_send_task_events=True,
        worker_consumer="nightjar.pipeline.queue.live_lane:Consumer",
        # The event of sending carries the bare task name and may come after the worker's own, whose
        # readable name it would then replace in Flower.
        task_send_sent_event=False,
        worker_hijack_root_logger=True,
        worker_detect_quorum_queues=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options=_transport_options(settings),
        task_serializer="json",
        accept_content=["json"],
        task_default_queue=PLAN_QUEUE,
        # A GPU worker adds the queues of its own models when it knows which those are.
        task_queues=[celery_queue(PLAN_QUEUE)],
        task_create_missing_queues=False,
        task_routes={name: {"queue": PLAN_QUEUE} for name in (PLAN_TASK, TICK_TASK, SWEEP_TASK)},
        beat_schedule=_schedule(settings),
        # Several a second: in Flower they would push out the micro-batches of a night.
        task_annotations=[_Plumbing()],
    )
    watch_worker(app, settings)
    if settings.message_key is None:
        worker_ready.connect(_warn_of_unsigned)
    return app


def _transport_options(settings: Settings) -> dict[str, object]:
    """Options of kombu's Redis transport; docs/guides/operations.md says why each is set."""
    key, sentinels = settings.message_key, settings.broker_sentinel_password
    return {
        "priority_steps": [0, 9],
        "queue_order_strategy": "round_robin",
        "socket_timeout": 30,
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
        "health_check_interval": 10,
        # Not kombu's: Nightjar's own transport asks for it.
        "signer": Signer(key.get_secret_value()) if key else None,
        # Of Sentinel alone; the sockets' limits would not reach it with a password.
        "master_name": settings.broker_master_name,
        "sentinel_kwargs": {
            "socket_timeout": 5,
            "socket_connect_timeout": 5,
            "password": sentinels.get_secret_value() if sentinels else None,
        },
    }


class _Plumbing:
    """Switches off the events of the planner's tasks, so that Flower does not show them."""

    def annotate(self, task: Task) -> dict[str, object] | None:
        return None if task.name == COMPUTE_TASK else {"send_events": False}

    def annotate_any(self) -> None:
        """Return None: no annotation is the same for all tasks."""


def _warn_of_unsigned(**_: object) -> None:
    logger.warning(
        "NIGHTJAR_MESSAGE_KEY is not set: unsigned messages are taken, from anyone who reaches the "
        "broker; set the same secret for all processes",
        extra={"action": "messages_unsigned"},
    )


def _write_fields(logger: logging.Logger, **_: object) -> None:
    for handler in logger.handlers:
        handler.setFormatter(make_formatter())
        handler.addFilter(QuietTicks(frozenset((TICK_TASK, SWEEP_TASK))))
    set_level()


def celery_queue(name: str) -> Queue:
    """A queue as Celery declares it."""
    # An exchange and a key of its own: with Celery's defaults every queue hangs on one exchange.
    return Queue(name, Exchange(name), routing_key=name)


def listen_for(app: Celery, fingerprints: Collection[str], live_threads: int) -> None:
    """Make this worker take micro-batches of these models only; called before the worker starts.

    live_threads: How many threads of its pool take single calls and nothing else, of all models.
    """
    queues = [queue for fingerprint in fingerprints for queue in compute_queues(fingerprint)]
    for name in queues:
        app.amqp.queues.add(celery_queue(name))
    app.amqp.queues.select(queues)
    calls = [celery_queue(live_queue(fingerprint)) for fingerprint in fingerprints]
    open_lane(app, calls, live_threads)


_BEGAN = datetime.now(UTC) - timedelta(seconds=time.monotonic())


def steady_now() -> datetime:
    """A clock that never jumps; a wall clock that is set back would make beat wait for it."""
    return _BEGAN + timedelta(seconds=time.monotonic())


def _schedule(settings: Settings) -> dict[str, dict[str, object]]:
    # Sweeping needs no message: each planner has a thread for it.
    every = schedule(settings.sweep_every_s, nowfun=steady_now)
    return {"tick": {"task": TICK_TASK, "schedule": every}}

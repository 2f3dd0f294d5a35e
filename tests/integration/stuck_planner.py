"""A planner that stops taking messages once it is ready, as Celery may when it loses count."""

from celery.signals import worker_ready

from nightjar.pipeline.planning import tasks
from nightjar.pipeline.queue.queues import PLAN_QUEUE

app = tasks.app


@worker_ready.connect
def stop_taking(sender: object, **_: object) -> None:
    """Cancel its consumer; the process lives on, and all looks well from outside."""
    sender.task_consumer.cancel_by_queue(PLAN_QUEUE)  # type: ignore[attr-defined]

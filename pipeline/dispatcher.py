"""Dispatch: publish ready micro-batches, one Celery message each, a bounded window at a time."""

import logging
from functools import lru_cache

from celery import Celery
from kombu import Queue

from nightjar.jobs.records import MicroBatchRef
from nightjar.jobs.store import Store
from nightjar.pipeline.celery_app import COMPUTE_TASK, ORDINARY, URGENT, celery_queue
from nightjar.pipeline.queues import compute_queue, compute_queues

logger = logging.getLogger(__name__)


@lru_cache(1024)
def _queue(name: str) -> Queue:
    return celery_queue(name)


def dispatch(app: Celery, store: Store, window: int) -> int:
    """Publish up to the window and mark what was published; return how many.

    A crash between the two leaves a message whose micro-batch is still ready: it is published
    again, and the claim makes the second one harmless.
    """
    published: list[MicroBatchRef] = []
    try:
        for ref in store.dispatchable(window):
            publish(app, ref)
            published.append(ref)
    finally:
        # One commit for all; also when the broker went away on the way.
        store.mark_dispatched(published)
    if published:
        logger.info("dispatched %d micro-batches", len(published), extra={"action": "dispatch"})
    return len(published)


def publish(app: Celery, ref: MicroBatchRef) -> None:
    """Send one micro-batch to the queue of its model, kind and bucket, readable in Flower."""
    kwargs: dict[str, object] = {"micro_batch": ref.id, "epoch": ref.epoch}
    if ref.isolated:  # else left out: workers of the version before do not know it
        kwargs["alone"] = True
    # Flower's metrics keep a series for each name, for ever: no counts in it.
    suspects = ", suspects" if ref.isolated else ""
    summary = (
        f"job={ref.job_id} micro_batch={ref.id} epoch={ref.epoch} kind={ref.kind.value} "
        f"bucket={ref.bucket} requests={ref.size} tokens={ref.tokens}"
    )
    app.send_task(
        COMPUTE_TASK,
        kwargs=kwargs,
        # Declared by what it is, not looked up by its name: this process declares no such queue.
        queue=_queue(compute_queue(ref.fingerprint, ref.kind, ref.bucket)),
        priority=URGENT if ref.urgent else ORDINARY,
        shadow=f"{ref.kind.value}, bucket {ref.bucket}{suspects}",
        argsrepr="",
        kwargsrepr=summary,
    )


def empty_queues(app: Celery, fingerprint: str) -> None:
    """Drop the messages of a model; what of its work still waits in SQL is sent again."""
    with app.connection_for_write() as connection, connection.channel() as channel:
        for name in compute_queues(fingerprint):
            channel.queue_purge(name)

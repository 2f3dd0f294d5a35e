"""Dispatch: publish ready micro-batches, one Celery message each, up to a limit."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

from celery import Celery
from kombu import Queue
from kombu.exceptions import OperationalError

from nightjar.jobs.records import MicroBatchRef
from nightjar.jobs.store.planning import Planning
from nightjar.jobs.tracing import current_traceparent, in_trace
from nightjar.pipeline.queue.celery_app import COMPUTE_TASK, ORDINARY, URGENT, celery_queue
from nightjar.pipeline.queue.queues import compute_queue, compute_queues, live_queue
from nightjar.pipeline.queue.waking import messages_waiting

logger = logging.getLogger(__name__)


# Workers that hold many leases need more messages than the limit: so many for each lease, leased
# ones included. So the broker never runs empty before the next pass.
PER_LEASE = 3

TraceOf = Callable[[str], str | None]


def dispatch(
    app: Celery, planning: Planning, limit: int, trace_of: TraceOf = lambda _: None
) -> int:
    """Publish up to `limit` micro-batches, or more for many workers; return how many.

    trace_of: gives the traceparent of a job.

    A crash after publishing leaves a message whose micro-batch is still ready. It is published
    again, and the claim makes the second message harmless.
    """
    published: list[MicroBatchRef] = []
    try:
        for ref in planning.dispatchable(limit, PER_LEASE):
            with in_trace(trace_of(ref.job_id)):
                publish(app, ref)
            published.append(ref)
    finally:
        # One commit for all, also where the broker fails half-way.
        planning.mark_dispatched(published)
    if published:
        logger.info("dispatched %d micro-batches", len(published), extra={"action": "dispatch"})
    return len(published)


def publish(app: Celery, ref: MicroBatchRef, *, retry: bool = True) -> None:
    """Send one micro-batch to the queue of its model, kind and bucket, readable in Flower.

    Args:
        app: Sends it.
        ref: The micro-batch.
        retry: Try again for a while where the broker is away.

    Raises:
        OperationalError: The broker is away.
    """
    kwargs: dict[str, object] = {"micro_batch": ref.id, "epoch": ref.epoch}
    if ref.isolated:  # only where it is set: workers of the version before do not know it
        kwargs["alone"] = True
    if ref.live:
        kwargs["live"] = True
    # Flower's metrics keep a series for each name, for ever: no counts in it.
    note = ", suspects" if ref.isolated else ", live" if ref.live else ""
    summary = (
        f"job={ref.job_id} micro_batch={ref.id} epoch={ref.epoch} kind={ref.kind.value} "
        f"bucket={ref.bucket} requests={ref.size} tokens={ref.tokens}"
    )
    app.send_task(
        COMPUTE_TASK,
        kwargs=kwargs,
        # The queue itself and not its name: this process declares no such queue.
        queue=_declared(_queue(ref)),
        priority=URGENT if ref.urgent or ref.live else ORDINARY,
        shadow=f"{ref.kind.value}, bucket {ref.bucket}{note}",
        argsrepr="",
        kwargsrepr=summary,
        retry=retry,
        # Only where there is a trace: workers of an older version refuse the header.
        headers=None if (trace := current_traceparent()) is None else {"traceparent": trace},
    )


def empty_queues(app: Celery, fingerprint: str) -> None:
    """Drop the messages of a model; those of its micro-batches that wait in SQL are sent again."""
    with app.connection_for_write() as connection, connection.channel() as channel:
        for name in [*compute_queues(fingerprint), live_queue(fingerprint)]:
            channel.queue_purge(name)


def find_lost(
    app: Celery, unclaimed: Sequence[MicroBatchRef], overdue: Sequence[MicroBatchRef]
) -> list[MicroBatchRef]:
    """Return the overdue micro-batches whose messages the broker no longer holds.

    Behind slow micro-batches, messages wait for long and are not lost. Where a queue holds fewer
    messages than unclaimed micro-batches, the difference is lost. The oldest are taken as lost,
    because a queue is served in order. Returns none where the broker is away.
    """
    expected = Counter(_queue(ref) for ref in unclaimed)
    lost: list[MicroBatchRef] = []
    try:
        for queue in {_queue(ref): None for ref in overdue}:
            missing = expected[queue] - messages_waiting(app, queue)
            lost += [ref for ref in overdue if _queue(ref) == queue][: max(0, missing)]
    except OperationalError as error:
        logger.warning("the broker is away: %s", error, extra={"action": "messages_uncounted"})
    return lost


def _queue(ref: MicroBatchRef) -> str:
    if ref.live:
        return live_queue(ref.fingerprint)
    return compute_queue(ref.fingerprint, ref.kind, ref.bucket)


@lru_cache(1024)
def _declared(name: str) -> Queue:
    return celery_queue(name)

"""Messages that wake the planner, and how many messages wait in a queue.

All wakes ask for the same: that the planner plans and dispatches what waits. So a queue that holds
some needs no more, and it stays short where no planner runs.
"""

import time

from celery import Celery
from kombu.exceptions import OperationalError

from nightjar.pipeline.queue.queues import PLAN_QUEUE

MOST_WAKES = 100

CLOCK_MARK = "nightjar.clock"
"""Key in the broker with the time of the last tick; gone when the clock has been silent."""

SILENT_AFTER_S = 30


def messages_waiting(app: Celery, queue: str) -> int:
    """Return how many messages of all priorities wait in a queue; taken ones do not count.

    Raises:
        OperationalError: The broker is away.
    """
    with app.producer_or_acquire() as producer:
        try:
            return int(producer.channel.queue_declare(queue=queue).message_count)
        except producer.connection.connection_errors as error:
            raise OperationalError(str(error)) from error


def send_wake(app: Celery, task: str, **options: object) -> bool:
    """Send a message that wakes the planner; False where enough of them wait.

    Processes that send at the same moment may exceed the bound, by one message each.

    Raises:
        OperationalError: The broker is away.
    """
    if messages_waiting(app, PLAN_QUEUE) >= MOST_WAKES:
        return False
    app.send_task(task, **options)
    return True


def mark_tick(app: Celery) -> None:
    """Write the clock's mark, which shows that it is alive."""
    with app.producer_or_acquire() as producer, producer.channel.conn_or_acquire() as client:
        client.set(CLOCK_MARK, int(time.time()), ex=SILENT_AFTER_S)

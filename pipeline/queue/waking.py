"""Messages that wake the planner, and how many messages wait in a queue.

Each wake asks for the same: a look at what is to be planned and dispatched. So a queue that holds
some already needs no more of them, and without a planner it stays short.
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
    """How many messages the broker holds for a queue, of all priorities; not those taken.

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

    The bound is exceeded by the number of those who send at the same moment, at most.

    Raises:
        OperationalError: The broker is away.
    """
    if messages_waiting(app, PLAN_QUEUE) >= MOST_WAKES:
        return False
    app.send_task(task, **options)
    return True


def mark_tick(app: Celery) -> None:
    """Leave the clock's mark, by which others see that it is alive."""
    with app.producer_or_acquire() as producer, producer.channel.conn_or_acquire() as client:
        client.set(CLOCK_MARK, int(time.time()), ex=SILENT_AFTER_S)

"""Messages that wake the planner, and how many messages wait in a queue.

Each wake asks for the same: a look at what is to be planned and dispatched. So a queue that holds
some already needs no more of them, and without a planner it stays short.
"""

from celery import Celery
from kombu.exceptions import OperationalError

from nightjar.pipeline.queues import PLAN_QUEUE

MOST_WAKES = 100


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

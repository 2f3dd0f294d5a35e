"""The lane of single calls in a GPU worker: threads that no micro-batch of a job can hold.

Celery gives each channel as many unacknowledged messages as its prefetch count. With one channel,
micro-batches of jobs would take every thread, and a call would wait until one of them has ended. So
calls have queues of their own, one for each model, and a channel of their own. The worker's pool
has threads for both channels.
"""

from collections.abc import Sequence
from typing import Any

from celery import Celery
from celery.bootsteps import ConsumerStep
from kombu import Consumer as QueueConsumer
from kombu import Queue

from nightjar.pipeline.queue import events


class Consumer(events.Consumer):
    """Celery's consumer, whose own channel leaves the lane's threads alone.

    lane_queues, lane_threads: The lane's queues, and how many threads of the pool are the lane's;
        `open_lane` sets both.
    """

    lane_queues: tuple[str, ...] = ()
    lane_threads = 0

    def __init__(self, *args: object, initial_prefetch_count: int = 2, **kwargs: object) -> None:
        most = max(1, initial_prefetch_count - self.lane_threads)
        super().__init__(*args, initial_prefetch_count=most, **kwargs)

    @property
    def max_prefetch_count(self) -> int:
        """Most messages of jobs at a time; Celery returns to it after a lost connection."""
        threads: int = self.pool.num_processes
        return max(1, threads - self.lane_threads) * int(self.prefetch_multiplier)


def open_lane(app: Celery, queues: Sequence[Queue], threads: int) -> None:
    """Make this process's worker take the queues' messages in threads of their own.

    Called once in a process, before its worker starts. The pool needs so many threads more.
    """
    Consumer.lane_queues, Consumer.lane_threads = tuple(one.name for one in queues), threads

    class Lane(ConsumerStep):  # type: ignore[misc]  # Celery is untyped
        """Consumes the queues on a channel of its own."""

        requires = ("celery.worker.consumer.tasks:Tasks",)

        def start(self, consumer: Any) -> None:  # noqa: ANN401 - Celery is untyped
            channel = consumer.connection.channel()
            channel.basic_qos(0, threads, False)
            lane = QueueConsumer(
                channel,
                queues=list(queues),
                accept=consumer.app.conf.accept_content,
                on_decode_error=consumer.on_decode_error,
            )
            lane.on_message = consumer.create_task_handler()
            self.consumers = [lane]
            lane.consume()

    app.steps["consumer"].add(Lane)

"""The Celery application without its tasks: enough for beat and Flower, quick to import."""

from celery.beat import ScheduleEntry
from celery.beat import Scheduler as CeleryScheduler

from nightjar.pipeline.queue.celery_app import create_celery_app
from nightjar.pipeline.queue.waking import mark_tick, send_wake
from nightjar.pipeline.settings import Settings

app = create_celery_app(Settings.read())


class Scheduler(CeleryScheduler):  # type: ignore[misc]  # Celery is untyped
    """Beat's scheduler in memory; no tick is sent while enough of them wait."""

    def apply_async(self, entry: ScheduleEntry, advance: bool = True, **_: object) -> None:
        """Send a tick; beat logs an error and continues."""
        due = self.reserve(entry) if advance else entry
        send_wake(self.app, due.task)
        mark_tick(self.app)

"""The Celery application without its tasks: enough for beat and Flower, quick to import."""

from celery.beat import ScheduleEntry
from celery.beat import Scheduler as CeleryScheduler
from celery.signals import beat_init

from nightjar.pipeline.metrics import declarations as declared
from nightjar.pipeline.metrics.opening import open_metrics
from nightjar.pipeline.metrics.recording import recorder
from nightjar.pipeline.queue.celery_app import create_celery_app
from nightjar.pipeline.queue.waking import mark_tick, send_wake
from nightjar.pipeline.settings import Settings

settings = Settings.read()
app = create_celery_app(settings)


@beat_init.connect
def _open(**_: object) -> None:
    open_metrics(settings, declared.BEAT)


class Scheduler(CeleryScheduler):  # type: ignore[misc]  # Celery is untyped
    """Beat's scheduler in memory; no tick is sent while enough of them wait."""

    def apply_async(self, entry: ScheduleEntry, advance: bool = True, **_: object) -> None:
        """Send a tick; beat logs an error and continues."""
        due = self.reserve(entry) if advance else entry
        send_wake(self.app, due.task)
        mark_tick(self.app)
        recorder.count(declared.TICKS)

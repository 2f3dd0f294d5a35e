"""The Celery application without its tasks: enough for beat and Flower, quick to import."""

from nightjar.pipeline.celery_app import create_celery_app
from nightjar.pipeline.settings import Settings

app = create_celery_app(Settings.read())

"""Settings of every Nightjar process, read from `NIGHTJAR_*` environment variables.

Each declaration says type, default, bounds, meaning, and who reads it. They make the page
docs/reference/settings.md: `python -m nightjar.pipeline.settings` prints it.
"""

import logging
import os
from typing import Any, Self

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from nightjar.pipeline.settings.api import (
    AccessSettings,
    LiveSettings,
    UploadSettings,
    WebhookSettings,
)
from nightjar.pipeline.settings.engine import EngineSettings
from nightjar.pipeline.settings.keeping import RetentionSettings, ReuseSettings
from nightjar.pipeline.settings.models import ModelSettings
from nightjar.pipeline.settings.monitoring import MonitoringSettings
from nightjar.pipeline.settings.places import PlaceSettings
from nightjar.pipeline.settings.schedules import ScheduleSettings
from nightjar.pipeline.settings.variables import unknown_variables
from nightjar.pipeline.settings.workers import PlanningSettings, WorkerSettings

logger = logging.getLogger(__name__)


class SettingsError(Exception):
    """A setting is missing or cannot be used; the message names the variable."""


class Settings(
    PlaceSettings,
    AccessSettings,
    ModelSettings,
    EngineSettings,
    PlanningSettings,
    WorkerSettings,
    UploadSettings,
    LiveSettings,
    ScheduleSettings,
    WebhookSettings,
    ReuseSettings,
    RetentionSettings,
    MonitoringSettings,
):
    """One frozen configuration for the planner, the workers, the API and the command line.

    Every field is the environment variable `NIGHTJAR_<FIELD>`, for example
    `NIGHTJAR_DATABASE_URL`. Units stand in the names: `_s` seconds, `_bytes` bytes.
    """

    model_config = SettingsConfigDict(env_prefix="NIGHTJAR_", frozen=True, extra="forbid")

    @property
    def all_worker_threads(self) -> int:
        """Threads of a GPU worker's pool: for jobs some for each model, and those for calls."""
        return self.worker_threads * max(1, len(self.model_paths)) + self.worker_live_threads

    @classmethod
    def read(cls, **given: Any) -> Self:
        """Read the environment; `given` fields take precedence.

        Raises:
            SettingsError: A variable cannot be used, or its name is nearly that of a setting.
        """
        for name, like in unknown_variables(os.environ, cls.model_fields):
            if like is not None:
                raise SettingsError(f"{name}: there is no such setting; did you mean {like}?")
            logger.warning("%s: no setting has that name; it is passed over", name)
        try:
            return cls(**given)
        except ValidationError as error:
            # Not the error's own text: it repeats values, and a URL holds a password.
            faults = [
                f"{_variable(fault['loc'][0])}: {fault['msg'].removeprefix('Value error, ')}"
                for fault in error.errors()
            ]
            raise SettingsError("; ".join(faults)) from None


def _variable(field: int | str) -> str:
    return f"NIGHTJAR_{field}".upper()


PARTS: tuple[type[BaseSettings], ...] = tuple(
    part for part in Settings.__bases__ if issubclass(part, BaseSettings)
)
"""The parts of `Settings`, in the order of the reference. A docstring begins with a title."""

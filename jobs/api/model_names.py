"""The names of models that may be given to the API."""

import time

from nightjar.jobs.model_choice import Choices, ConfiguredModels
from nightjar.jobs.store.models import Models

_KEPT_S = 1.0


class ModelNames:
    """The names that jobs may give.

    A model is known if a planner plans for it or the API's own settings name it. Known is enough:
    a job may be sent before the first worker is up. While no model is known at all, every name is
    taken, because the deployment is starting.

    Args:
        models: Where planners say what they plan for.
        configured: What the settings of the API say.
    """

    def __init__(self, models: Models, configured: ConfiguredModels) -> None:
        self._models = models
        self.configured = configured
        self._kept: tuple[float, Choices] | None = None  # with the moment until which it is used

    def read(self, *, may_wait: bool = False) -> Choices:
        """The names as they are now; one statement. `may_wait`: errors tell of `wait_for_model`."""
        return Choices(self._models.known(), self.configured, may_wait=may_wait)

    def recent(self, asked: str | None) -> Choices:
        """The names as they were a moment ago; read again where the asked one was unknown.

        For single calls, which come often.
        """
        kept = self._kept
        if kept is not None and time.monotonic() < kept[0] and kept[1].knows(asked):
            return kept[1]
        choices = self.read()
        self._kept = time.monotonic() + _KEPT_S, choices
        return choices

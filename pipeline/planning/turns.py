"""Which job is planned next: single calls first, then models take turns, and tenants within each.

Each model has fair turns of its own, as a tenant's share is one of each model.
"""

from collections import deque
from collections.abc import Collection

from nightjar.jobs.records import JobToPlan
from nightjar.jobs.store.backlog import Backlog
from nightjar.pipeline.planning.fair_turns import FairTurns
from nightjar.pipeline.planning.models import PlanningModel, PlanningModels

_MOST_YIELDING = 8  # looked at in one choice


class Turns:
    """Chooses among the jobs that are to be planned.

    A job of a model that is not planned for here is never chosen, and keeps nobody waiting.

    Args:
        backlog: Knows the jobs.
        models: What is planned for.
        enough: A tenant that has more micro-batches ready for a model yields to others.
    """

    def __init__(self, backlog: Backlog, models: PlanningModels, enough: int) -> None:
        self._backlog = backlog
        self._models = models
        self._enough = enough
        self._order = deque(models)
        self._tenants = {model.name: FairTurns() for model in models}

    def next_job(self, besides: Collection[str]) -> JobToPlan | None:
        """The job to plan a chunk of, and none of `besides`; None if none is to be planned."""
        if len(self._order) == 1:
            return self._of_model(self._order[0], besides)
        if (call := self._backlog.next_call(list(self._tenants), besides)) is not None:
            return call
        for _ in range(len(self._order)):
            model = self._order[0]
            self._order.rotate(-1)
            found = self._of_model(model, besides)
            if found is not None:
                return found
        return None

    def charge(self, planned: JobToPlan, tokens: int) -> None:
        """Charge what was planned to the job's tenant, in the turns of the job's model."""
        self._tenants.get(planned.model, self._tenants[self._order[0].name]).charge(planned, tokens)

    def _of_model(self, model: PlanningModel, besides: Collection[str]) -> JobToPlan | None:
        """Choose among the first jobs of the tenants."""
        name = None if self._models.accepts_any else model.name
        is_only = len(self._order) == 1
        waiting = self._backlog.first_of_tenants(besides, name, is_only=is_only)
        if len(waiting) < 2 or waiting[0].overtakes:
            return waiting[0] if waiting else None
        in_turn = self._tenants[model.name].in_turn(waiting)
        for item in in_turn[:_MOST_YIELDING]:
            if not self._backlog.is_planned_ahead(item.tenant, model.fingerprint, self._enough):
                return item
        return in_turn[0]
